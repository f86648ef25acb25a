"""Buckets: one memory, two views of it; and which tensors share one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaxmpi.primitives import Bucket, buckets_of

MI = 2**20


def tensors_of(kind, shapes, dtype="float32"):
    """Tensors with different numbers everywhere, beginning at 1: padding's zeros are no number."""
    count, tensors = 1, []
    for shape in shapes:
        size = int(np.prod(shape))
        tensors.append(np.arange(count, count + size).reshape(shape).astype(dtype))
        count += size
    if kind == "torch":
        torch = pytest.importorskip("torch")
        return [torch.from_numpy(t) for t in tensors]
    return tensors


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_flat_holds_the_tensors_in_order_then_zeros(kind):
    # bagua.md 5.1, check 27: 3 + 4 + 3 numbers aligned to 4 leave 2 zeros.
    bucket = Bucket(tensors_of(kind, [(3,), (2, 2), (3,)]), ["a", "b", "c"], align=4)
    assert np.asarray(bucket.flat).tolist() == [*range(1, 11), 0, 0]
    assert bucket.nbytes == 40
    assert bucket.names == ("a", "b", "c")
    assert [tuple(v.shape) for v in bucket.views] == [(3,), (2, 2), (3,)]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_views_and_flat_share_memory_both_ways(kind):
    given_ = tensors_of(kind, [(3,), (2, 2)])
    bucket = Bucket(given_)
    bucket.views[1][0, 1] = -7
    assert np.asarray(bucket.flat).tolist() == [1, 2, 3, 4, -7, 6, 7]
    bucket.flat[:] = 9
    assert [np.asarray(v).tolist() for v in bucket.views] == [[9] * 3, [[9, 9], [9, 9]]]
    assert np.asarray(given_[0]).tolist() == [1, 2, 3], "the tensors were copied, not taken"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_scalars_and_empty_tensors(kind):
    bucket = Bucket(tensors_of(kind, [(), (0,), (2, 0, 3), (1,), ()]), align=8)
    assert [tuple(v.shape) for v in bucket.views] == [(), (0,), (2, 0, 3), (1,), ()]
    assert np.asarray(bucket.flat).tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    bucket.views[4][...] = 5
    assert float(bucket.flat[2]) == 5
    assert bucket.nbytes == 12


def test_a_bucket_of_nothing_but_an_empty_tensor_is_empty():
    bucket = Bucket([np.zeros((0, 4))], align=16)
    assert bucket.flat.shape == (0,)
    assert bucket.nbytes == 0


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=8),
    align=st.integers(1, 9),
    dtype=st.sampled_from(["float64", "float32", "float16", "int32"]),
)
def test_law_padding_is_zero_and_no_view_reaches_it(shapes, align, dtype):
    tensors = tensors_of("numpy", shapes, dtype)
    bucket = Bucket(tensors, align=align)
    count = sum(t.size for t in tensors)
    assert len(bucket.flat) % align == 0
    assert 0 <= len(bucket.flat) - count < align
    assert bucket.nbytes == count * np.dtype(dtype).itemsize
    for view, tensor in zip(bucket.views, tensors, strict=True):
        assert view.dtype == tensor.dtype
        assert np.array_equal(view, tensor)
        view[...] = 1
    assert (bucket.flat[:count] == 1).all()
    assert (bucket.flat[count:] == 0).all()


def test_strided_tensors_and_parameters_are_copied_by_value():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    bucket = Bucket([weight.t(), weight])
    assert bucket.flat.tolist() == [0, 3, 1, 4, 2, 5, 0, 1, 2, 3, 4, 5]
    assert not bucket.flat.requires_grad
    assert Bucket([np.arange(6).reshape(2, 3).T]).flat.tolist() == [0, 3, 1, 4, 2, 5]


def test_bfloat16_tensors():
    torch = pytest.importorskip("torch")
    bucket = Bucket([torch.ones(3, dtype=torch.bfloat16)], align=2)
    assert bucket.flat.dtype == torch.bfloat16
    assert (bucket.flat.tolist(), bucket.nbytes) == ([1, 1, 1, 0], 6)


def test_what_cannot_share_a_bucket_is_named():
    with pytest.raises(TypeError, match="left is float32 on cpu, right is float64 on cpu"):
        Bucket([np.ones(2, "f4"), np.ones(2)], ["left", "right"])
    with pytest.raises(ValueError, match="at least one tensor"):
        Bucket([])
    with pytest.raises(ValueError, match="2 tensors have 1 names"):
        Bucket([np.ones(1), np.ones(1)], ["only"])
    with pytest.raises(ValueError, match="align must be at least 1"):
        Bucket([np.ones(1)], align=0)
    with pytest.raises(TypeError, match="not a buffer"):
        Bucket([[1.0, 2.0]])


def named(groups, names):
    return [[names[i] for i in group] for group in groups]


def test_buckets_close_when_they_reach_the_limit():
    # bagua.md 5.1, check 29.
    sizes = [4 * MI * k for k in (1, 2, 3, 4, 5)]
    assert named(buckets_of(sizes, 16 * MI), "ABCDE") == [["A", "B", "C"], ["D"], ["E"]]
    ready = [sizes[i] for i in (3, 4, 0, 1, 2)]
    assert named(buckets_of(ready, 16 * MI), "DEABC") == [["D"], ["E"], ["A", "B", "C"]]


def test_kinds_never_share_a_bucket():
    # bagua.md 5.1, check 29: the same buckets; ours come in the order in which they are full.
    sizes = [4 * MI, 12 * MI, 10 * MI, 14 * MI, 44 * MI]
    kinds = ["f32", "f32", "f16", "f16", "f32"]
    groups = named(buckets_of(sizes, 16 * MI, kinds=kinds), "ABCDE")
    assert groups == [["A", "B"], ["C", "D"], ["E"]]


def test_incomplete_buckets_come_last_and_the_first_may_be_small():
    assert buckets_of([1, 1, 5, 1], 4, kinds="xyyx") == [[1, 2], [0, 3]]
    assert buckets_of([1, 1, 1, 1, 1], 2, first=1) == [[0], [1, 2], [3, 4]]
    assert buckets_of([], 4) == []
    with pytest.raises(ValueError, match="at least one byte"):
        buckets_of([1], 0)


@given(
    sizes=st.lists(st.integers(0, 20), max_size=30),
    kinds=st.data(),
    limit=st.integers(1, 30),
)
def test_law_every_tensor_once_in_order_and_no_bucket_larger_than_needed(sizes, kinds, limit):
    kind = kinds.draw(st.lists(st.sampled_from("xyz"), min_size=len(sizes), max_size=len(sizes)))
    groups = buckets_of(sizes, limit, kinds=kind)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    unfinished = 0
    for group in groups:
        assert group == sorted(group)
        assert len({kind[i] for i in group}) == 1
        assert sum(sizes[i] for i in group[:-1]) < limit
        unfinished += sum(sizes[i] for i in group) < limit
    assert unfinished <= len(set(kind))
