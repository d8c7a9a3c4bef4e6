"""product: NumPy's matmul on our own threads."""

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from peft_core import kernels
from peft_core.blas import _OneThread, product


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (4, 5)), ((300, 200), (200, 151)), ((2, 2000), (2000, 1500)), ((3, 200, 64), (3, 64, 301)),
     ((5, 1, 130, 64), (2, 64, 301)), ((0, 4), (4, 5)), ((2000, 1), (1, 2000))],
)  # fmt: skip
def test_product_is_matmul(threads, a, b):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=a), rng.normal(size=b)
    truth = np.einsum("...ik,...kj->...ij", x, y)
    np.testing.assert_allclose(product(x, y), truth, rtol=1e-10, atol=1e-10)
    out = np.full((*truth.shape[:-1], 2 * truth.shape[-1]), np.nan)[..., ::2]  # a strided place
    assert product(x, y, out=out) is out
    np.testing.assert_allclose(out, truth, rtol=1e-10, atol=1e-10)


def test_transposed_operands(threads):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 300)).astype("f4"), rng.normal(size=(151, 200)).astype("f4")
    assert product(x.T, y.T).dtype == np.float32
    np.testing.assert_allclose(product(x.T, y.T), x.T.astype("f8") @ y.T, rtol=1e-4, atol=1e-4)


def test_blas_runs_on_one_thread_inside_and_as_before_outside():
    def now():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    before = now()
    with _OneThread():
        assert set(now()) <= {1}
    assert now() == before


def test_shapes_that_do_not_fit_raise_from_either_path(threads):
    for n in (3, 300):
        with pytest.raises(ValueError, match="mismatch"):
            product(np.ones((n, n)), np.ones((n + 1, n)))


def test_the_callers_error_state_holds_on_every_thread(threads):
    x = np.ones((300, 300))
    x[0, 0], x[-1, 0], x[-1, 1] = np.inf, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        product(x, x)
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        product(x, x)
