import torch

from duotone.inference.stopping import StopTexts


def decode(rows):
    return ["".join(chr(token) for token in row) for row in rows]


def ids(*texts):
    return torch.tensor([[ord(letter) for letter in text] for text in texts])


def test_each_answer_ends_at_its_own_stop():
    stops = StopTexts(["Q:"], decode, prompt_tokens=2)
    assert stops(ids("Q:aQ", "Q:ab"), None).tolist() == [False, False]
    assert stops(ids("Q:aQ:", "Q:abc"), None).tolist() == [True, False]
    assert stops(ids("Q:aQ:_", "Q:abcd"), None).tolist() == [True, False]
    assert stops.trim([[1, 2, 3, 0], [4, 5, 6, 7]]) == [[1, 2, 3], [4, 5, 6, 7]]


def test_a_stop_is_noticed_in_long_answers():
    stops = StopTexts(["\n\n"], decode, prompt_tokens=0)
    assert not stops(ids("a" * 99 + "\n"), None).item()
    assert stops(ids("a" * 99 + "\n\n"), None).item()
    assert stops.lengths == {0: 101}
