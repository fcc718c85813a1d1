import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Tensors are small here: threads that wait for one another cost minutes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
