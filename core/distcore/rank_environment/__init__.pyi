from distcore.rank_environment.environment import export as export
from distcore.rank_environment.environment import join as join
from distcore.rank_environment.network import address_toward as address_toward
from distcore.rank_environment.network import is_here as is_here
from distcore.rank_environment.network import port_for_ranks as port_for_ranks
from distcore.rank_environment.network import where as where

__all__: list[str]
