"""The verbs on torch CPU tensors."""

import numpy as np
import pytest

import relaxmpi as rx

torch = pytest.importorskip("torch")
RANKS = pytest.mark.ranks(1, 2, 3, 4)
DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "int32", "int64", "uint8"]


@RANKS
@pytest.mark.parametrize("dtype", DTYPES)
def test_verbs(comm, dtype):
    n, kind = comm.size, getattr(torch, dtype)
    for d in (0, 1, n + 1, 513):
        x = (torch.arange(d) % 5 + comm.rank).to(kind)
        total = (torch.arange(d) % 5 * n + n * (n - 1) // 2).to(kind)
        assert rx.allreduce(comm, x) is x
        assert torch.equal(x, total)
        rows = rx.allgather(comm, torch.full((d,), comm.rank, dtype=kind))
        assert isinstance(rows, torch.Tensor)
        assert rows.dtype == kind
        assert rows.shape == (n, d)
        chunk = rx.reduce_scatter(comm, torch.ones(d, dtype=kind))
        assert chunk.dtype == kind
        whole = rx.allgather(comm, chunk, torch.empty(d, dtype=kind))
        assert torch.equal(whole, torch.full((d,), n, dtype=kind))
        assert torch.equal(
            rx.broadcast(comm, torch.full((d,), comm.rank, dtype=kind), root=n - 1),
            torch.full((d,), n - 1, dtype=kind),
        )


@pytest.mark.ranks(2, 3, 4)
def test_bfloat16_is_summed_in_single_precision(comm):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    exact = sum(
        torch.randn(1000, generator=torch.Generator().manual_seed(r)).bfloat16().float()
        for r in range(comm.size)
    )
    assert torch.equal(rx.allreduce(comm, x.clone()), exact.bfloat16())
    assert torch.equal(rx.allreduce(comm, x.clone(), op=rx.MEAN), (exact / comm.size).bfloat16())
    coded = rx.allreduce(comm, x.clone(), op=rx.MEAN, codec=rx.Quantizer(bits=8))
    assert coded.dtype == torch.bfloat16
    assert (coded.float() - exact / comm.size).abs().max() < 0.1


@pytest.mark.ranks(1, 2)
def test_parameters_and_views(comm):
    layer = torch.nn.Linear(3, 2)
    rx.allreduce(comm, layer.weight, op=rx.MEAN)
    assert layer.weight.requires_grad
    base = torch.zeros(10)
    rx.allreduce(comm, base[2:5].add_(1))
    assert base.sum() == 3 * comm.size
    assert rx.allreduce(comm, torch.tensor(2.0)) == 2 * comm.size


@pytest.mark.ranks(1, 2)
def test_what_is_no_buffer(comm):
    for x, kind in [
        (torch.ones(4, 4).t()[::2], ValueError),
        (torch.eye(3).to_sparse(), TypeError),
        (torch.ones(3, device="meta"), TypeError),
        (torch.ones(3, dtype=torch.complex64).conj(), ValueError),
    ]:
        with pytest.raises(kind):
            rx.allreduce(comm, x)
    strided = torch.arange(12.0).reshape(3, 4).t()
    out = rx.allreduce(comm, strided, torch.empty(4, 3))
    assert torch.equal(out, strided * comm.size)
    conj = torch.tensor([1 + 2j]).conj()
    assert rx.allreduce(comm, conj, torch.empty(1, dtype=conj.dtype))[0] == (1 - 2j) * comm.size


@pytest.mark.ranks(2)
def test_numpy_and_torch_are_the_same_to_the_peers(comm):
    x = np.ones(5) if comm.rank else torch.ones(5, dtype=torch.float64)
    assert float(rx.allreduce(comm, x)[0]) == 2
