"""The laws of distcore, one module each: every function is a case that measures one promise."""
