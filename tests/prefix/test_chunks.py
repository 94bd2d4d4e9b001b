"""Chunks, groups, padding and hashes: the facts K-01 to K-09, K-11 and K-12, and what kvboost gets wrong there."""

import hashlib

import numpy as np
import pytest
import torch

from hibachi import InvalidRequest
from hibachi.prefix import (
    broadcast_kv,
    chained_hash,
    content_hash_from_tokens,
    find_common_chunk_prefix,
    group_by_prefix,
    pad_and_mask,
)


@pytest.mark.parametrize(
    "prompts, chunk, common",
    [
        pytest.param([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9]], 4, 4, id="k01"),
        pytest.param([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9]], 4, 4, id="k02"),
        pytest.param([[1, 2, 3], [1, 2, 3]], 4, 0, id="k03"),
        pytest.param([], 4, 0, id="k04-none"),
        pytest.param([[1, 2, 3, 4, 5]], 4, 5, id="k04-single"),
        pytest.param([[1] * 8, [1] * 8], 4, 8, id="identical"),
        pytest.param([[1] * 9, [1] * 9, [2] * 9], 4, 0, id="the-third-differs"),
        pytest.param([[1] * 9, [1] * 9, []], 4, 0, id="an-empty-one"),
        pytest.param([[1, 2, 3], [1, 2, 4]], 1, 2, id="chunks-of-one"),
    ],
)
def test_k01_to_k04_the_common_prefix_in_whole_chunks(prompts, chunk, common):
    assert find_common_chunk_prefix(prompts, chunk) == common
    assert find_common_chunk_prefix([np.array(p, int) for p in prompts], chunk) == common
    assert find_common_chunk_prefix([torch.tensor(p, dtype=torch.int64) for p in prompts], chunk) == common


@pytest.mark.parametrize("chunk", [0, -1, 1.5, None, True])
def test_k05_a_chunk_has_tokens(chunk):
    for prompts in ([[1, 2]], [[1, 2], [1, 2]], []):
        with pytest.raises(ValueError, match="chunk_size must be an integer >= 1"):
            find_common_chunk_prefix(prompts, chunk)
    with pytest.raises(InvalidRequest, match="chunk_size"):
        group_by_prefix([], [], chunk)


def test_k06_broadcasting_is_a_view_on_numpy_and_torch():
    k, v = np.random.rand(1, 2, 3, 4), np.random.rand(1, 2, 3, 5)
    ((wide, other),) = broadcast_kv([(k, v)], 5)
    assert wide.shape == (5, 2, 3, 4) and other.shape == (5, 2, 3, 5)
    assert wide.strides[0] == 0 and wide.ctypes.data == k.ctypes.data and (wide == k).all()
    k, v = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4)
    ((wide, other),) = broadcast_kv(((k, v),), 5)
    assert tuple(wide.shape) == (5, 2, 3, 4) and wide.stride()[0] == 0 and wide.data_ptr() == k.data_ptr()
    assert other.data_ptr() == v.data_ptr() and (other == v).all()


@pytest.mark.slow
def test_k06_broadcasting_on_jax_copies():
    import jax.numpy as jnp

    k = jnp.arange(24.0).reshape(1, 2, 3, 4)
    ((wide, _),) = broadcast_kv([(k, k)], 5)
    assert wide.shape == (5, 2, 3, 4) and (wide == k).all()


@pytest.mark.parametrize("shape", [(2, 2, 3, 4), (2, 3, 4), ()])
def test_k07_only_one_row_is_broadcast(shape):
    with pytest.raises(InvalidRequest, match=r"must have shape \(1, heads, tokens, size\); got"):
        broadcast_kv([(np.zeros((1, 2, 3, 4)), np.zeros(shape))], 5)
    with pytest.raises(InvalidRequest, match="batch_size"):
        broadcast_kv([(np.zeros((1, 2, 3, 4)),) * 2], 0)
    with pytest.raises(InvalidRequest, match="cannot be had for batch_size=9223372036854775808: ValueError"):
        broadcast_kv([(np.zeros((1, 2, 3, 4)),) * 2], 2**63)


def test_k08_padding_and_masks():
    assert pad_and_mask([[1, 2, 3], [4]], 0) == ([[1, 2, 3], [4, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    assert pad_and_mask([[], []], 7) == ([[], []], [[], []])
    with pytest.raises(ValueError, match="at least one list"):
        pad_and_mask([], 0)
    with pytest.raises(InvalidRequest, match="Token ids must be integers"):
        pad_and_mask([[1]], None)


def test_defect_pad_id_0_is_an_id_like_others():
    assert pad_and_mask([[5], [5, 5]], 0)[0] == [[5, 0], [5, 5]]


def test_k09_groups():
    ids = [[1] * 12 + [7], [1] * 4 + [2] * 8, [1] * 12 + [8], [], [1] * 4 + [2] * 8, []]
    groups = group_by_prefix(list("abcdef"), ids, 4)
    assert list(groups.values()) == [[0, 2], [1, 4], [3, 5]] and groups["empty"] == [3, 5]
    assert next(iter(groups)) == content_hash_from_tokens([1] * 12)
    assert list(group_by_prefix("ab", [[1, 2, 3], [1, 2, 4]], 2, n_prefix_chunks=1).values()) == [[0, 1]]
    with pytest.raises(InvalidRequest, match="for each of 2 prompts; got 1"):
        group_by_prefix(["a", "b"], [[1]], 4)
    with pytest.raises(InvalidRequest, match="n_prefix_chunks"):
        group_by_prefix(["a"], [[1]], 4, 0)


def test_k11_hashes():
    raw = b"".join(i.to_bytes(4, "little") for i in (1, 2, 300))
    assert content_hash_from_tokens([1, 2, 300]) == hashlib.sha256(raw).hexdigest()
    assert chained_hash([1, 2, 300]) == hashlib.sha256(b"root" + raw).hexdigest() == chained_hash([1, 2, 300], "root")
    assert chained_hash([1], "a") == chained_hash(np.array([1]), "a") != chained_hash([1], "b")
    assert chained_hash([1], "a") != chained_hash([2], "a")
    for wrong in (-1, 2**32):
        with pytest.raises(InvalidRequest, match=f"from 0 to 2\\^32 - 1; got {wrong}"):
            content_hash_from_tokens([1, wrong])
        with pytest.raises(InvalidRequest):
            chained_hash([wrong], "a")
    assert content_hash_from_tokens([2**32 - 1])
    for wrong in (["a"], [1.5], None, 3):
        with pytest.raises(InvalidRequest, match="Token ids must be integers"):
            content_hash_from_tokens(wrong)


def test_k12_another_model_has_other_names():
    names = {chained_hash([1, 2], "a", fingerprint=model) for model in ("", "m float32", "m bfloat16", "m+adapter")}
    assert len(names) == 4
    assert chained_hash([1, 2], "a", fingerprint="m") == chained_hash([1, 2], "a", fingerprint="m")
