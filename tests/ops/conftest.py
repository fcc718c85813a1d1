import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Run tests on one thread, because tensors are small and waiting threads cost minutes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
