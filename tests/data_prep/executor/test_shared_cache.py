"""Workers tell each other of words: whole records, the same words in every log, and the same tokens whoever learned them."""

import multiprocessing

import numpy as np

from data_prep.executor import shared_cache
from data_prep.executor.shared_cache import Channels, Exchange
from data_prep.tokens.encoder import WordEncoder
from megabert.data.tokenizer import Tokenizer

RECORD = np.dtype([("key", "<u8"), ("start", "<i4"), ("length", "<i4")])
TOKEN = np.dtype("<u2")


def words(first, count):
    """Word k has k % 3 + 1 tokens, all of them k."""
    keys = np.arange(first, first + count)
    records = np.zeros(count, RECORD)
    records["key"], records["length"] = keys, keys % 3 + 1
    return records, np.repeat(keys, records["length"]).astype(TOKEN)


def _talk(channels, turn, size, results):
    """Publish 20 times `size` words, and look for those of everybody all the while and when all have published."""
    channels.join()
    own = Exchange(channels, RECORD, TOKEN)
    first = 1000 * (channels.own + 1)
    wanted = np.arange(1, 1000 * (len(channels.logs) + 1) + 1000).astype(np.uint64)
    early = late = np.zeros(0, np.uint64)
    for k in range(20):
        own.publish(*words(first + k * size, size))
        for where, records, tokens in own.find(wanted):
            assert np.array_equal(records["key"], wanted[where])
            assert np.array_equal(tokens, np.repeat(records["key"], records["length"]))
            early = np.union1d(early, records["key"])
    turn.wait()
    for where, records, tokens in own.find(wanted):
        assert np.array_equal(records["key"], wanted[where])
        assert np.array_equal(tokens, np.repeat(records["key"], records["length"]))
        late = np.concatenate([late, records["key"]])
    results.put((channels.own, early.tolist(), late.tolist()))


def talk(workers, size):
    """(number, keys found on the way, keys found at last) of each of `workers` real processes."""
    context = multiprocessing.get_context("fork")
    channels, turn, results = Channels(workers), context.Barrier(workers), context.Queue()
    processes = [context.Process(target=_talk, args=(channels, turn, size, results)) for _ in range(workers)]
    for process in processes:
        process.start()
    found = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(own for own, _, _ in found) == list(range(workers))
    return found


def test_every_word_published_is_found_whole_by_everybody():
    want = [1000 * (worker + 1) + k for worker in range(3) for k in range(20 * 17)]
    for own, early, late in talk(3, 17):
        assert sorted(late) == want
        assert {1000 * (own + 1) + k for k in range(20 * 17)} <= set(early) <= set(want)


def test_a_full_log_takes_no_more(monkeypatch):
    monkeypatch.setattr(shared_cache, "WORDS", 100)  # 50 a worker: the third 17 words do not fit
    for _, _, late in talk(2, 17):
        assert sorted(late) == [1000 * worker + k for worker in (1, 2) for k in range(34)]


def _encode(channels, path, turn, texts, results):
    channels.join()
    tokenizer = Tokenizer.load(path)
    learned = []
    encode_batch = tokenizer.encode_batch
    tokenizer.encode_batch = lambda batch, threads=1: learned.extend(batch) or encode_batch(batch, threads)
    encoder = WordEncoder(tokenizer, np.dtype("uint16"))
    encoder.share()
    mine = []
    for i, text in enumerate(texts):
        if i % 2 == channels.own:  # in turn: each knows all that came before
            encoder.add([text])
            mine.append((i, encoder.finish().encoded))
        turn.wait()
    results.put((mine, learned))


def test_a_word_is_learned_by_one_worker_and_every_worker_gives_its_tokens(tokenizer_file):
    tokenizer = Tokenizer.load(tokenizer_file)
    texts = [
        f"Tom\u00e1s saw word{i} and word{i - 1} of the {'many ' * i}others. Then (he) left!"
        for i in range(8)
    ]
    context = multiprocessing.get_context("fork")
    channels, turn, results = Channels(2), context.Barrier(2), context.Queue()
    arguments = (channels, str(tokenizer_file), turn, texts, results)
    processes = [context.Process(target=_encode, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    learned = [word for _, words in found for word in words]
    assert len(learned) == len(set(learned)) and {"word3", "Tom\u00e1s", "many"} <= set(learned)
    for i, encoded in (item for mine, _ in found for item in mine):
        alone = WordEncoder(tokenizer, np.dtype("uint16"))
        alone.add([texts[i]])
        want = alone.finish().encoded
        assert np.array_equal(encoded.tokens, want.tokens)
        assert np.array_equal(encoded.sentence_lengths, want.sentence_lengths)


def test_another_encoder_does_not_share():
    channels = Channels(1)
    assert (
        channels.opened_for(b"first") and channels.opened_for(b"first") and not channels.opened_for(b"second")
    )
    assert shared_cache.open_here(b"first", RECORD, TOKEN) is None, "this process joined no pool"
