import pytest

from distcore.testing import StrategyContract


class TestTensorParallel(StrategyContract):
    strategy = "mesh"
    options = {"tp": 2}


@pytest.mark.slow  # FSDP2 alone, as the contract of fsdp has it
class TestSharded(StrategyContract):
    strategy = "mesh"


@pytest.mark.slow
class TestTensorParallelAndSharded(StrategyContract):
    strategy = "mesh"
    options = {"tp": 2, "shard": 2}
    nproc = 4


@pytest.mark.slow
class TestTensorParallelAndReplicated(StrategyContract):
    strategy = "mesh"
    options = {"tp": 2, "replicate": 2}
    nproc = 4


class TestPipeline(StrategyContract):
    strategy = "mesh"
    options = {"pp": 2}


class TestInterleavedPipeline(StrategyContract):
    strategy = "mesh"
    options = {"pp": 2, "pp_schedule": "interleaved"}


@pytest.mark.slow
class TestPipelineSharded(StrategyContract):
    strategy = "mesh"
    options = {"pp": 2, "shard": 2}
    nproc = 4


@pytest.mark.slow
class TestPipelineOfTensorParallelStages(StrategyContract):
    strategy = "mesh"
    options = {"pp": 2, "tp": 2}
    nproc = 4


@pytest.mark.slow
class TestInterleavedPipelineSharded(StrategyContract):
    strategy = "mesh"
    options = {"pp": 2, "pp_schedule": "interleaved", "shard": 2}
    nproc = 4


@pytest.mark.slow
class TestInterleavedPipelineOfTensorParallelStages(StrategyContract):
    strategy = "mesh"
    options = {"pp": 2, "pp_schedule": "interleaved", "tp": 2}
    nproc = 4


@pytest.mark.slow  # a mixture over two ranks is compared in test_mesh_experts.py
class TestExpertParallel(StrategyContract):
    strategy = "mesh"
    options = {"ep": 2}


@pytest.mark.slow
class TestExpertAndTensorParallel(StrategyContract):
    strategy = "mesh"
    options = {"ep": 2, "shard": 2, "tp": 2}
    nproc = 4


@pytest.mark.slow
class TestExpertParallelStages(StrategyContract):
    strategy = "mesh"
    options = {"ep": 2, "shard": 2, "pp": 2}
    nproc = 4
