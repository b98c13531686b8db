"""``distcore train --profile``, an extension: where the time of a step goes."""
