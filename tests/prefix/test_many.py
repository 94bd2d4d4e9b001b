"""Many prompts: each shared prefix is computed once, and the cache never changes an answer."""

import numpy as np
import pytest

from hibachi import (
    LLM,
    AutoregressiveBatchInference,
    InvalidRequest,
    NumpyBackend,
    SamplingParams,
    Terms,
    UnsupportedOperation,
)
from hibachi.llm.texts import Texts
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.prefix import cache_stats, generate_many, group_by_prefix, reset_cache, verify_correctness, warm
from hibachi.testing.toys import SumLogits, SumOwn, SumPaged, expected

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(5, 2000, n).tolist()


class Long(SumPaged):
    max_model_len = 600


@pytest.fixture
def toy():
    """Texts over a model that adds up its tokens, whose engine counts what it computes."""
    made = []

    def make(**options):
        options = dict(max_num_seqs=8, max_num_batched_tokens=256, block_size=16) | options
        engine = AutoregressiveBatchInference(Long(NumpyBackend()), backend=NumpyBackend(), **options)
        made.append(Texts(engine, NoTokenizer(), vocab_size=10, eos_ids=(), default_params=GREEDY))
        return made[-1]

    yield make
    for texts in made:
        texts.close()


def test_k10_results_come_in_the_order_of_the_prompts(tiny):
    texts = ["The night was", "Once", "The night is", "A", "The night was", "Once upon"]
    outs = generate_many(tiny, texts, GREEDY)
    assert [out.prompt for out in outs] == texts
    assert [out.text for out in outs] == [tiny.generate(t, GREEDY)[0].text for t in texts]
    assert generate_many(tiny, [], GREEDY) == []


def test_k13_defect_unequal_suffixes_are_answered_as_alone(tiny):
    common = ids(64)
    prompts = [common + ids(n, n) for n in (1, 5, 17, 2, 30)]
    alone = []
    for prompt in prompts:
        reset_cache(tiny)
        alone.append(tiny.generate(prompt, GREEDY)[0].token_ids)
    for _ in range(2):  # cold, then warm
        assert [out.token_ids for out in generate_many(tiny, prompts, GREEDY)] == alone
    assert [out.token_ids for out in generate_many(tiny, prompts, GREEDY, mode="baseline")] == alone


def test_k14_defect_identical_prompts_that_are_all_in_the_cache(toy):
    llm, prompt = toy(), [1] * 32
    first = generate_many(llm, [prompt])[0].token_ids
    before = llm.meters().computed
    outs = generate_many(llm, [prompt] * 3, GREEDY.with_(max_tokens=1))
    assert [out.token_ids for out in outs] == [first[:1]] * 3
    # At least the last token is computed again, and with it its block, as blocks are what is shared.
    assert llm.meters().computed - before == 3 * 16
    llm = toy(block_size=1)
    generate_many(llm, [prompt])
    before = llm.meters().computed
    assert generate_many(llm, [prompt], GREEDY.with_(max_tokens=1))[0].token_ids == first[:1]
    assert llm.meters().computed - before == 1


def test_k15_defect_a_first_token_that_ends_the_text(tiny):
    prompts = [ids(20, 1), ids(20, 2)]
    firsts = [tiny.generate(p, GREEDY)[0].token_ids[0] for p in prompts]
    params = [GREEDY.with_(stop_token_ids=[firsts[0]], include_stop=True), GREEDY]
    outs = generate_many(tiny, prompts, params)
    assert outs[0].token_ids == firsts[:1] and outs[0].finish_reason == "stop"
    assert len(outs[1].token_ids) == 8


@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_k16_defect_warm_cold_and_no_cache_say_the_same(tiny, chunks):
    reset_cache(tiny)
    found = verify_correctness(tiny, [ids(32 * chunks + 3, chunks), ids(32 * chunks, chunks)], GREEDY)
    assert found.correct and not found.differing
    assert found.difference == 0.0 == found.tolerance  # the engine is deterministic: equal in every bit
    assert found.reused == [32 * chunks, 32 * chunks - 16]


def test_k16_what_differs_is_found(tiny, monkeypatch):
    reset_cache(tiny)
    prompts, lie = [ids(40, 1), ids(40, 2)], ids(40, 3)
    submit = tiny.submit
    calls = []

    def submits(given, *args, **kwargs):
        calls.append(given)
        return submit([lie, given[1]] if len(calls) == 3 else given, *args, **kwargs)

    monkeypatch.setattr(tiny, "submit", submits)
    found = verify_correctness(tiny, prompts, SamplingParams(temperature=0.5, max_tokens=4))
    assert found.differing == [0] and not found.correct and len(calls) == 3


def test_k17_a_cold_run_computes_the_prompt_and_a_warm_one_its_suffix(toy):
    llm, prompt = toy(), [1, 2, 3, 4] * 50
    one = GREEDY.with_(max_tokens=1)
    generate_many(llm, [prompt], one)
    assert llm.meters().computed == 200  # cold: not twice, as if every chunk were encoded again to keep it
    generate_many(llm, [prompt[:192] + [5] * 7], one)
    assert llm.meters().computed == 200 + 7


def test_k18_defect_one_group_and_each_with_its_own_parameters(tiny):
    common = ids(48)
    prompts = [[*common, i] for i in (7, 8, 9, 10)]
    params = [
        GREEDY.with_(max_tokens=2),
        SamplingParams(temperature=1.3, seed=5, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.3, seed=6, max_tokens=4, ignore_eos=True, top_p=0.7),
        GREEDY.with_(max_tokens=12, stop=["e"]),
    ]
    assert list(map(len, group_by_prefix(prompts, prompts, 16).values())) == [4]
    outs = generate_many(tiny, prompts, params)
    assert [len(o.token_ids) for o in outs[:3]] == [2, 20, 4]
    assert outs[3].finish_reason == "stop" and "e" not in outs[3].text
    alone = [tiny.generate(p, own)[0] for p, own in zip(prompts, params, strict=True)]
    assert [(o.text, o.token_ids) for o in outs] == [(o.text, o.token_ids) for o in alone]


def test_k19_defect_temperature_0_is_greedy(tiny):
    (out,) = generate_many(tiny, [ids(30)], GREEDY.with_(logprobs=1))
    for token, found in zip(out.token_ids, out.logprobs, strict=True):
        assert found[token] == max(found.values())


def test_k32_defect_eight_prompts_share_512_tokens_that_are_computed_once(toy):
    llm, common = toy(), [1, 2, 3, 4, 5, 6, 7, 8] * 64
    prompts = [common + [i] * (i + 1) for i in range(8)]
    outs = generate_many(llm, prompts, GREEDY.with_(max_tokens=1))
    assert [out.token_ids for out in outs] == [expected(p, 1) for p in prompts]
    suffixes = sum(len(p) - 512 for p in prompts)
    assert llm.meters().computed == 512 + suffixes  # and not 8 * 512
    assert cache_stats(llm).tokens_found == 7 * 512
    reset_cache(llm)
    before = llm.meters().computed
    generate_many(llm, prompts, GREEDY.with_(max_tokens=1), mode="baseline")
    assert llm.meters().computed - before == 8 * 512 + suffixes


def test_k06_the_engine_never_broadcasts_but_shares_blocks(toy):
    """Eight rows of 512 tokens fit into a cache of 50 blocks, at the same time."""
    llm = toy(kv_cache_memory_bytes=49 * 16 * 12)
    common = [1, 2, 3, 4] * 128
    streams = llm.submit([common] + [[*common, i] for i in range(8)], GREEDY.with_(max_tokens=12))
    outs = [stream.tokens.collect() for stream in streams]
    assert outs[1:] == [expected([*common, i], 12) for i in range(8)]
    stats = llm.stats()
    assert stats.preemptions == 0 and stats.blocks == 49
    assert llm.meters().decode.rows.sum / llm.meters().decode.rows.count > 4  # side by side


def test_defect_prefixes_are_shared_at_any_block_also_between_groups(toy):
    """kvboost's groups are those of the first three chunks, so these two never meet."""
    llm, common = toy(), [1, 2, 3, 4, 5] * 20
    prompts = [[*common, 7], [*common, 8]]
    assert len(group_by_prefix(prompts, prompts, 128)) == 2
    generate_many(llm, prompts, GREEDY.with_(max_tokens=1))
    assert cache_stats(llm).tokens_found == 96


def test_prompts_that_begin_alike_stand_together(toy):
    """The cache holds one prefix; in the given order each would push out the others."""
    llm = toy(max_num_seqs=1, kv_cache_memory_bytes=12 * 16 * 12)
    prompts = [[i % 4] * 128 + [i] for i in range(8)] + [[i % 4] * 128 + [9] for i in range(4)]
    outs = generate_many(llm, prompts, GREEDY.with_(max_tokens=2))
    assert [out.token_ids for out in outs] == [expected(p, 2) for p in prompts]
    assert cache_stats(llm).tokens_found == (12 - 4) * 128


def test_statistics_and_reset(toy):
    llm, prompt = toy(), [1] * 40
    assert cache_stats(llm) == cache_stats(llm.engine)
    assert cache_stats(llm).hit_rate == 0.0
    generate_many(llm, [prompt] * 2, terms=[Terms(), Terms(tenant="b")])
    found = cache_stats(llm)
    assert (found.tokens_asked, found.tokens_found, found.block_size) == (80, 32, 16) and found.hit_rate == 0.4
    assert found.cached_blocks == 2 and found.free_blocks == found.blocks
    reset_cache(llm)
    assert cache_stats(llm).cached_blocks == 0
    generate_many(llm, [prompt])
    assert cache_stats(llm).tokens_found == 32


@pytest.mark.parametrize(
    "options",
    [
        {"recompute_strategy": "selective"},
        {"recompute_strategy": "cacheblend"},
        {"recompute_strategy": "CacheBlend"},
        {"mode": "chunk_kv_reuse"},
        {"mode": "CHUNK_KV_REUSE"},
    ],
)
def test_approximate_reuse_is_refused_by_name(tiny, options):
    ((name, value),) = options.items()
    with pytest.raises(UnsupportedOperation, match=f"{name}='{value}' reuses keys and values that are not those"):
        generate_many(tiny, ["a"], **options)
    assert generate_many(tiny, ["a"], GREEDY, recompute_strategy="none", mode="PREFIX_CACHE")


@pytest.mark.parametrize("options", [{"recompute_strategy": "x"}, {"mode": None}, {"mode": "x"}])
def test_what_is_no_mode(tiny, options):
    with pytest.raises(InvalidRequest, match=f"{next(iter(options))} must be"):
        generate_many(tiny, ["a"], **options)
    with pytest.raises(InvalidRequest, match="for each of 2 rows; got 1"):
        generate_many(tiny, ["a", "b"], [GREEDY])


def test_it_holds_on_a_second_engine_as_well():
    with LLM("tiny", enable_prefix_caching=False) as llm:
        found = verify_correctness(llm, [ids(40)])
        assert found.correct and found.reused == [0]


# ---- warming ---------------------------------------------------------------------------------------------------------


def test_k17_k32_what_was_warmed_is_computed_once(tiny):
    text = "Once upon a time there was a little girl named Lily. " * 4
    count = len(tiny.tokenizer.encode(text))
    made = warm(tiny, text, terms=Terms(cache_salt="w"))
    whole, tail = divmod(count, made.chunk_size)
    assert (made.token_count, made.chunks_stored, made.partial_tail_tokens) == (count, whole, tail)
    assert made.chunk_boundary_aligned is (not tail) and bool(made.alignment_warning) is bool(tail)
    before = cache_stats(tiny).tokens_found
    tiny.generate([text + end for end in ("She", "He", "It")], terms=Terms(cache_salt="w"))
    assert cache_stats(tiny).tokens_found == before + 3 * whole * made.chunk_size
    assert warm(tiny, text, terms=Terms(cache_salt="w")).chunks_stored <= 1  # its last block is computed again
    for toy in (SumPaged, SumOwn):
        with AutoregressiveBatchInference(toy(NumpyBackend()), block_size=4, max_model_len=64) as engine:
            assert warm(engine, [1, 2, 3, 4, 5, 6, 7, 8, 9]).chunks_stored == 2
            stream = engine.run([1, 2, 3, 4, 5, 6, 7, 8, 1], max_tokens=1)
            assert (stream.collect(), stream.reused) == (expected([1, 2, 3, 4, 5, 6, 7, 8, 1], 1), 8)


def test_what_keeps_no_prefixes_cannot_be_warmed():
    for toy, options in ((SumLogits, {}), (SumPaged, {"enable_prefix_caching": False})):
        engine = AutoregressiveBatchInference(toy(NumpyBackend()), max_model_len=64, **options)
        with engine, pytest.raises(UnsupportedOperation, match=f"{toy.__name__} keeps no prefixes here"):
            warm(engine, [1, 2])
    with pytest.raises(InvalidRequest, match="which keeps what it has computed; got SumPaged"):
        warm(SumPaged(NumpyBackend()), [1, 2])
