from distcore.testing import StrategyContract


class TestFSDP(StrategyContract):
    strategy = "fsdp"
