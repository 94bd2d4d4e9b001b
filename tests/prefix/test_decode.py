"""Keys and values from elsewhere are gone on with by the engine: the tokens are those of its own prefill."""

import math

import numpy as np
import pytest
import torch
import transformers

import hibachi
from hibachi import LLM, InvalidRequest, NumpyBackend, PromptTooLong, SamplingParams, UnsupportedOperation
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.prefix import batched_decode, broadcast_kv, cache_stats, prefill
from hibachi.testing.toys import SumBoth, SumLogits, SumPaged, SumState, TinyDecoder, expected, tiny_weights

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LENGTHS = (41, 16, 3, 25)


def prompts_of(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(5, 2000, n).tolist() for n in lengths]


def wanted_of(llm, prompts, params):
    return [out.token_ids for out in llm.generate(prompts, params)]


@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_k13_rows_of_unequal_length_say_what_they_say_alone(library):
    prompts = prompts_of(LENGTHS)
    with LLM("tiny", backend=library, enable_prefix_caching=False, max_num_seqs=3) as llm:
        alone = [llm.generate(p, GREEDY)[0].token_ids for p in prompts]
        kv, firsts, lengths = prefill(llm, prompts)
        assert lengths == list(LENGTHS) and firsts == [ids[0] for ids in alone]
        native = [tuple(llm.backend.put(half) for half in layer) for layer in kv]
        for given in (kv, native):
            ids, out = batched_decode(llm, given, np.array(firsts), lengths=lengths, params=GREEDY)
            assert ids == alone and out is None
        for b, n in enumerate(lengths):  # each row by itself: neither company nor padding leaves a trace
            own = [(k[b : b + 1, :, :n], v[b : b + 1, :, :n]) for k, v in kv]
            assert batched_decode(llm, own, [firsts[b]], params=GREEDY)[0] == [alone[b]]
        ids, out = batched_decode(llm, native, firsts, lengths=lengths, params=GREEDY, return_kv=True)
        assert all(llm.backend.owns(half) for layer in out for half in layer)
        back = [[llm.backend.get(half) for half in layer] for layer in out]
        again = prefill(llm, [p + new[:-1] for p, new in zip(prompts, ids, strict=True)])
        for got, same in zip(back, again.kv, strict=True):
            for a, b in zip(got, same, strict=True):
                assert a.shape == (4, 2, 48, 64)  # of all tokens but the last of the longest row
                assert (a == b).all()


def test_preempted_rows_say_the_same(tiny):
    prompts = prompts_of([120] * 6, 7)
    wanted = wanted_of(tiny, prompts, GREEDY.with_(max_tokens=60))
    kv, firsts, _ = prefill(tiny, prompts)
    with LLM("tiny", kv_cache_memory_bytes=50 * 16 * 4 * 2 * 2 * 64 * 2 * 2) as small:
        for known in (None, prompts):
            ids, _ = batched_decode(small, kv, firsts, params=GREEDY, max_tokens=60, token_ids=known)
            assert ids == wanted
        assert small.stats().preemptions > 0


@pytest.mark.slow
def test_keys_and_values_of_transformers_are_taken(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 1)
        ids = torch.randint(1, 97, (2, 11))
        seen = model(ids, use_cache=True)
        whole = model.generate(ids, max_new_tokens=9, do_sample=False)[:, 11:]
    model.save_pretrained(tmp_path)
    kv = [(layer.keys, layer.values) for layer in seen.past_key_values.layers]
    firsts = seen.logits[:, -1].argmax(-1)
    for served in (hibachi.load_model(tmp_path), hibachi.load_model(tmp_path, hibachi.load_backend("torch"))):
        out, _ = batched_decode(served, kv, firsts, max_tokens=9)
        assert out == whole.tolist()


# ---- kvboost's own call ----------------------------------------------------------------------------------------------


def causal(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    make = transformers.AutoConfig.for_model
    model = transformers.AutoModelForCausalLM.from_config(make(kind, **sizes, **ids)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 1)
        prompts = torch.randint(1, 97, (3, 11))
        seen = model(prompts, use_cache=True)
    return model, prompts, seen.past_key_values, seen.logits[:, -1].argmax(-1)


def own_decoding(model, prompt, n, eos):
    """A loop of the model's own greedy decoding, without us and without a cache."""
    new = []
    while len(new) < n and eos not in new:
        with torch.no_grad():
            new.append(int(model(torch.tensor([[*prompt, *new]]), use_cache=False).logits[0, -1].argmax()))
    return new


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_k13_k15_k19_the_call_of_kvboost_says_what_the_models_own_decoding_says(kind):
    model, prompts, past, firsts = causal(kind)
    configured, layers = dict(vars(model.config)), [(layer.keys, layer.values) for layer in past.layers]
    eos = own_decoding(model, prompts[0].tolist(), 4, None)[3]
    for stop, given in ((int(firsts[1]), past), (eos, tuple(layers))):
        want = [own_decoding(model, prompt, 9, stop) for prompt in prompts.tolist()]
        ids, kv = batched_decode(model, given, firsts, 11, 9, stop, 1.0, False, "cpu")
        assert ids == want and sorted({*map(len, ids)})[0] < 9
    assert batched_decode(model, past, firsts, 11, 9, eos, temperature=0, do_sample=True)[0] == want
    own = [own_decoding(model, prompt, 9, None) for prompt in prompts.tolist()]
    assert batched_decode(model, past, firsts, 11, max_new_tokens=9)[0] == own  # its own stop tokens, which are none
    again = prefill(model, [[*prompt, *new[:-1]] for prompt, new in zip(prompts.tolist(), ids, strict=True)])
    for got, want, before in zip(kv, again.kv, layers, strict=True):
        for a, b, c in zip(got, want, before, strict=True):
            assert a.dtype == c.dtype and torch.equal(a[:, :, :11], c) and np.allclose(a, b, atol=1e-5)
    assert dict(vars(model.config)) == configured
    assert [own_decoding(model, prompt, 9, None) for prompt in prompts.tolist()] == own  # it is its owner's again


def test_k18_sampling_is_drawn_by_hibachi_and_repeated_by_a_seed():
    model, _, past, firsts = causal("llama")
    hot = {"temperature": 5.0, "do_sample": True}
    once, again = (batched_decode(model, past, firsts, 11, 30, [], **hot)[0] for _ in range(2))
    assert once != again and all(len(row) == 30 for row in once)
    params = [SamplingParams(temperature=5, seed=seed, max_tokens=9) for seed in (1, 2, 3)]
    first, same = (batched_decode(model, past, firsts, params=params)[0] for _ in range(2))
    assert first == same
    alone = [(k[2:], v[2:]) for k, v in ((layer.keys, layer.values) for layer in past.layers)]
    assert batched_decode(model, alone, firsts[2:], params=params[2])[0] == [first[2]]


def test_what_a_model_of_transformers_cannot_is_said():
    model, _, past, firsts = causal("llama")
    with pytest.raises(InvalidRequest, match="device must be where the model is, cpu; got 'cuda:1'"):
        batched_decode(model, past, firsts, 11, 9, [], 1.0, False, "cuda:1")
    with pytest.raises(InvalidRequest, match="each of the 2 layers of LlamaForCausalLM; got 0 layers"):
        batched_decode(model, transformers.DynamicCache(), firsts, 11, 9)
    with pytest.raises(UnsupportedOperation, match="BloomForCausalLM cannot run in the paged engine"):
        batched_decode(causal("bloom")[0], past, firsts, 11, 9)


# ---- each row with what is its own -----------------------------------------------------------------------------------


def toy_kv(prompts):
    """What `SumPaged` keeps, [B, 1, S, dim]."""
    values = np.zeros((len(prompts), 1, max(map(len, prompts)), 1), np.float32)
    for i, prompt in enumerate(prompts):
        values[i, 0, : len(prompt), 0] = prompt
    return [(np.zeros((*values.shape[:3], 2), np.float32), values)]


def decode(prompts, *, toy=None, **options):
    toy = toy or SumPaged(NumpyBackend())
    firsts = [expected(p, 1)[0] for p in prompts]
    return batched_decode(toy, toy_kv(prompts), firsts, lengths=[len(p) for p in prompts], **options)


def test_a_model_of_level_2_gets_an_engine_for_the_call():
    prompts = [[1, 2], [3], [4, 4, 4, 4, 4]]
    ids, kv = decode(prompts, max_tokens=12, return_kv=True)
    assert ids == [expected(p, 12) for p in prompts]
    ((keys, values),) = kv
    assert keys.shape == (3, 1, 16, 2) and values.dtype == np.float32
    for row, prompt, new in zip(values[:, 0, :, 0], prompts, ids, strict=True):
        assert row.tolist() == [*prompt, *new][:-1] + [0] * (5 - len(prompt))


@pytest.mark.slow
def test_what_comes_back_is_right_on_jax_without_kernels():
    from hibachi_jax import JaxBackend  # its cache has the heads before the positions

    backend = JaxBackend("cpu", native=False)
    ids, out = batched_decode(SumPaged(backend), toy_kv([[1, 2], [3, 3]]), [4, 7], max_tokens=20, return_kv=True)
    assert ids == [expected([1, 2], 20), expected([3, 3], 20)]
    assert out[0][1][1, 0, :, 0].tolist() == [3, 3, *ids[1]][:-1]
    weights = tiny_weights()
    kv, firsts, _ = prefill(TinyDecoder(backend, weights), [[1, 2, 3, 4, 5] * 4])
    ids, out = batched_decode(TinyDecoder(backend, weights), kv, firsts, max_tokens=4, return_kv=True)
    again = prefill(TinyDecoder(NumpyBackend(), weights), [[1, 2, 3, 4, 5] * 4 + ids[0][:-1]])
    for got, same in zip(out, again.kv, strict=True):
        for a, b in zip(got, same, strict=True):
            assert np.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("library", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_what_comes_back_is_as_it_was_given(library):
    backend = hibachi.load_backend(library)
    kv = [tuple(backend.put(half, "float16") for half in layer) for layer in toy_kv([[1, 2], [3, 3]])]
    ids, out = batched_decode(SumPaged(backend), kv, [4, 7], max_tokens=5, return_kv=True)
    assert ids == [expected([1, 2], 5), expected([3, 3], 5)]
    assert {half.dtype for half in out[0]} == {kv[0][0].dtype} and tuple(out[0][0].shape) == (2, 1, 6, 2)
    assert backend.get(out[0][1])[1, 0, :, 0].tolist() == [3, 3, *ids[1]][:-1]


def test_k15_a_first_token_that_ends_the_text_ends_its_row_and_no_other():
    prompts = [[1, 2], [3], [5]]
    assert [expected(p, 1)[0] for p in prompts] == [4, 4, 6]
    ids, kv = decode(prompts, max_tokens=6, eos_token_id=4, return_kv=True)
    assert ids[:2] == [[4], [4]] and ids[2] == expected([5], 6)[: len(ids[2])] and len(ids[2]) > 1
    assert kv[0][1][:2, 0, :2, 0].tolist() == [[1, 2], [3, 0]]
    ids, _ = decode(prompts, max_tokens=6, eos_token_id=[4, expected([5], 2)[1]])
    assert ids == [[4], [4], expected([5], 2)]


def test_k15_the_model_says_which_tokens_these_are():
    class Ends(SumPaged):
        eos_ids = (4,)

    assert decode([[1, 2], [5]], toy=Ends(NumpyBackend()), max_tokens=3)[0][0] == [4]
    params = SamplingParams(temperature=0, ignore_eos=True)
    assert decode([[1, 2]], toy=Ends(NumpyBackend()), params=params, max_tokens=3)[0] == [expected([1, 2], 3)]
    params = SamplingParams(temperature=0, min_tokens=2)  # it could not have come here
    assert len(decode([[1, 2]], toy=Ends(NumpyBackend()), params=params, max_tokens=3)[0][0]) > 1


@pytest.mark.parametrize("n", [1, 2, 5])
def test_no_row_has_more_than_max_new_tokens(n):
    ids, kv = decode([[1, 2], [3]], max_tokens=n, return_kv=True)
    assert ids == [expected([1, 2], n), expected([3], n)] and kv[0][0].shape[2] == 1 + n
    assert decode([[1] * 62], max_tokens=n)[0] == [expected([1] * 62, min(n, 2))]  # the end of the context


def test_k18_each_row_has_its_own_limit_temperature_stop_and_seed(tiny):
    prompts = prompts_of([9, 20, 33, 20], 3)
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=12, max_tokens=12, ignore_eos=True, top_p=0.9, frequency_penalty=1),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, include_stop=True),
    ]
    stop = wanted_of(tiny, prompts[3:], params[3])[0][6]
    params[3] = params[3].with_(stop_token_ids=[stop])
    alone = [tiny.generate(p, own)[0].token_ids for p, own in zip(prompts, params, strict=True)]
    assert len(alone[0]) == 3 and 2 <= len(alone[3]) <= 7
    kv, firsts, _ = prefill(tiny, prompts, params)
    assert batched_decode(tiny, kv, firsts, token_ids=prompts, params=params)[0] == alone


def test_k19_temperature_0_is_the_most_likely_token():
    class Given(SumPaged):
        vocab_size = 3

        def step(self, params, cache, x):
            _, cache = self._sums(x.tok, cache[0], x)
            return np.tile(np.array([[1.0, 3.0, 2.0]], np.float32), (len(x.last), 1)), [cache]

    out, _ = batched_decode(Given(NumpyBackend()), toy_kv([[1]]), [2], max_tokens=4)
    assert out == [[2, 1, 1, 1]]


# ---- who shares them -------------------------------------------------------------------------------------------------


def test_only_blocks_whose_ids_are_given_are_found_by_others():
    (prompt,) = prompts_of([40], 5)
    with LLM("tiny") as llm:
        want = llm.generate(prompt, GREEDY)[0].token_ids
        kv, firsts, _ = prefill(llm, [prompt])
        hibachi.prefix.reset_cache(llm)
        asked = cache_stats(llm).tokens_found
        assert batched_decode(llm, kv, firsts, params=GREEDY)[0] == [want]
        assert llm.generate(prompt, GREEDY)[0].token_ids == want
        assert cache_stats(llm).tokens_found == asked
        hibachi.prefix.reset_cache(llm)
        assert batched_decode(llm, kv, firsts, params=GREEDY, token_ids=[prompt])[0] == [want]
        assert llm.generate(prompt, GREEDY)[0].token_ids == want
        assert cache_stats(llm).tokens_found == asked + 32


def test_rows_that_were_broadcast_are_taken(tiny):
    prompts = prompts_of([30], 9)
    kv, firsts, _ = prefill(tiny, prompts)
    ids, _ = batched_decode(tiny, broadcast_kv(kv, 3), firsts * 3, params=GREEDY)
    assert ids == wanted_of(tiny, prompts, GREEDY) * 3


@pytest.mark.slow
def test_they_go_to_another_process(tiny):
    prompts = prompts_of(LENGTHS)
    kv, firsts, lengths = prefill(tiny, prompts)
    with RemoteLLM("tiny") as llm:
        ids, _ = batched_decode(llm, kv, firsts, lengths=lengths, params=GREEDY)
        assert ids == wanted_of(tiny, prompts, GREEDY)
        with pytest.raises(InvalidRequest, match="stay in the engine's process"):
            batched_decode(llm, kv, firsts, lengths=lengths, params=GREEDY, return_kv=True)
        with pytest.raises(InvalidRequest, match="Keys of layer 0 must have shape"):
            batched_decode(llm, [(v, v[..., :3]) for _, v in kv][::-1], firsts[:1], params=GREEDY)
        hibachi.prefix.reset_cache(llm)
        assert llm.generate(prompts[0], GREEDY)[0].token_ids == ids[0]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"past_kv": []}, "each of the 1 layers of SumPaged; got 0 layers"),
        ({"past_kv": toy_kv([[1], [2]]) * 2}, "got 2 layers"),
        ({"past_kv": toy_kv([[1]])}, r"Keys of layer 0 must have shape \(2, 1, 1, 2\).*got \(1, 1, 1, 2\)"),
        ({"past_kv": [(np.zeros((2, 1, 3, 2)), np.zeros((2, 1, 2, 1)))]}, r"Values of layer 0 .*got \(2, 1, 2, 1\)"),
        ({"past_kv": [(np.zeros((2, 2, 3, 2)), np.zeros((2, 2, 3, 1)))]}, r"must have shape \(2, 1, 3, 2\)"),
        ({"past_kv": [(np.zeros((2, 1, 3, 2), int), np.zeros((2, 1, 3, 1)))]}, "array of floats; got int64"),
        ({"first_tokens": [1]}, r"must have shape \(1, 1, 2, 2\)"),
        ({"first_tokens": [1, 10]}, "an id from 0 to 9; got 10"),
        ({"first_tokens": "ab"}, "Token ids must be integers"),
        ({"first_tokens": []}, "at least one row"),
        ({"lengths": [1]}, "lengths must have one entry for each of 2 rows; got 1"),
        ({"lengths": [0, 1]}, "lengths must be from 1 to 2, the positions in past_kv; got 0"),
        ({"lengths": [-1, 1]}, "lengths must be from 1 to 2, the positions in past_kv; got -1"),
        ({"lengths": [2**63, 1]}, "lengths must be from 1 to 2, the positions in past_kv; got 9223372036854775808"),
        ({"lengths": [math.nan, 1]}, "lengths must be integers"),
        ({"lengths": 3}, "got 3"),
        ({"token_ids": [[1, 2]]}, "one entry for each of 2 rows; got 1"),
        ({"token_ids": [[1, 2], [3]], "lengths": [2, 2]}, r"expected \[2, 2\] ids; got \[2, 1\]"),
        ({"token_ids": [[1, 2], [3, 10]]}, "Token ids must be from 0 to 9"),
        ({"params": [SamplingParams()]}, "for each of 2 rows; got 1"),
        ({"params": SamplingParams(stop=["x"])}, "stop takes texts"),
        ({"params": SamplingParams(n=2)}, "n and best_of must be 1"),
        ({"params": SamplingParams(repetition_penalty=2)}, "are not known here"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1; got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1; got 0"),
        ({"start_pos": 3}, "start_pos must be 2, the positions in past_kv; got 3"),
        ({"params": SamplingParams(), "do_sample": True}, "do_sample and temperature; got both"),
        ({"past_kv": [(np.zeros((2, 1, 0, 2)), np.zeros((2, 1, 0, 1)))]}, "at least one position; got none"),
        ({"past_kv": None}, "must be a list with .* got None"),
    ],
)
def test_what_is_wrong_is_named(changes, says):
    given = {"past_kv": toy_kv([[1, 2], [3, 3]]), "first_tokens": [4, 7]} | changes
    with pytest.raises(InvalidRequest, match=says):
        batched_decode(SumPaged(NumpyBackend()), **given)


@pytest.mark.parametrize(
    "toy, says",
    [
        (SumState, "keeps a recurrent state"),
        (SumBoth, "layer 1 of SumBoth keeps a recurrent state"),
        (SumLogits, "is of level 1"),
    ],
)
def test_models_without_keys_and_values_in_all_layers_are_refused(toy, says):
    with pytest.raises(UnsupportedOperation, match=says):
        decode([[1, 2]], toy=toy(NumpyBackend()))


def test_a_prompt_that_fills_the_context_is_refused(tiny):
    with pytest.raises(PromptTooLong):
        decode([[1] * 64], max_tokens=2)
    with pytest.raises(InvalidRequest, match="LLM has its backend"):
        batched_decode(tiny, [], [1], backend="torch")
