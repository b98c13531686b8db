from distcore.testing import StrategyContract


class TestLocalSGD(StrategyContract):
    strategy = "localsgd"
