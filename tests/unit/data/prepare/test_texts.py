import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.data.prepare.texts import hash_texts, text_buffers
from definitions.texts import define_hash_texts
from harness.examples import examples

KINDS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
TEXTS = [
    b"",
    b"a",
    b"ab",
    b"68fd1e64",
    b"68fd1e641",
    b"\x00",
    b"\x00\x00",
    b"12345678abcdefgh",
    "Übermaß".encode(),
    None,
]
GOLDEN = [
    (0x0000000000000000, 0x00000000),
    (0xFB761138E1E0A78C, 0xA1C3D698),
    (0x94061CDD698E67A0, 0x22FFA838),
    (0x9EE448FF0B64D69B, 0xA46078BE),
    (0xD4EFCB2183835FA1, 0x3D111218),
    (0xE220A8397B1DCDAF, 0xAD53D547),
    (0x6E789E6AA1B965F4, 0xBDBDF2EC),
    (0x88A8E96C069AA1F8, 0xFA8B01CF),
    (0x9840B418396261F7, 0x613ECFAB),
    (0x0000000000000000, 0x00000000),
]


def hashed(array):
    keys, checks = hash_texts(array)
    assert keys.dtype == np.uint64
    assert checks.dtype == np.uint32
    return list(zip(keys.tolist(), checks.tolist(), strict=True))


def test_hashes_never_change_since_they_decide_the_rows_of_hashed_categories():
    assert hashed(pa.array(TEXTS, pa.binary())) == GOLDEN


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(texts=st.lists(st.one_of(st.none(), st.text(max_size=40)), max_size=30), data=st.data())
@examples(60)
def test_hashes_equal_their_twin_for_every_kind_of_array_and_slice(kind, texts, data):
    encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    encoded = [None if text is None else text.decode("utf-8", "replace").encode() for text in encoded]
    start = data.draw(st.integers(0, len(texts)))
    stop = data.draw(st.integers(start, len(texts)))
    array = pa.array(encoded, pa.binary()).cast(kind)[start:stop]
    keys, checks = define_hash_texts(encoded[start:stop])
    assert hashed(array) == list(zip(keys.tolist(), checks.tolist(), strict=True))


def test_a_null_hashes_to_zero_even_if_it_has_bytes():
    offsets, data = np.array([0, 3, 6], np.int32), b"abcabc"
    array = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(offsets), pa.py_buffer(data)])
    assert array.to_pylist() == ["abc", None]
    first, second = hashed(array)
    assert first == hashed(pa.array(["abc"]))[0] != (0, 0)
    assert second == (0, 0)


def test_texts_of_the_same_length_up_to_eight_bytes_never_share_a_key():
    texts = [f"{n:08x}" for n in range(0, 2**32, 2**32 // 50_000)]
    keys, _ = hash_texts(pa.array(texts))
    assert len(set(keys.tolist())) == len(texts)


def test_zeros_at_the_end_and_the_length_of_a_text_count():
    keys, checks = hash_texts(pa.array([b"a", b"a\0", b"a\0\0", b"", b"\0", b"\0" * 8, b"\0" * 16], pa.binary()))
    assert len(set(keys.tolist())) == 7
    assert len(set(checks.tolist())) == 7


def test_keys_and_checks_are_spread_evenly_and_independent_of_each_other():
    keys, checks = hash_texts(pa.array([str(n) for n in range(100_000)]))
    assert len(set(keys.tolist())) == 100_000
    for bits in (keys % np.uint64(64), keys >> np.uint64(58), checks % np.uint32(64), checks >> np.uint32(26)):
        counts = np.bincount(bits.astype(np.int64), minlength=64)
        assert abs(counts - 100_000 / 64).max() < 6 * (100_000 / 64) ** 0.5
    together = np.corrcoef(keys >> np.uint64(32), checks)[0, 1]
    assert abs(together) < 0.02


def test_an_empty_array_without_buffers_has_no_texts():
    assert hashed(pa.array([], pa.string())) == []
    assert hashed(pa.array(["a", "b"])[1:1]) == []


def test_an_array_of_numbers_has_no_texts():
    with pytest.raises(TypeError, match="int64 has no texts"):
        text_buffers(pa.array([1]))
