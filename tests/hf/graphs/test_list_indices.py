import pytest
import torch

from duotone.hf.graphs.list_indices import ListIndices


@pytest.mark.parametrize(
    "index",
    [[1, 3], (slice(None), [0, -1]), (..., [2, 2]), [True, False, True, True], 1, ([0, 1], [2, 0])],
)
def test_lists_index_as_before(index):
    tensor = torch.arange(12.0).reshape(4, 3)
    expected, expected_set = tensor[index].clone(), tensor.clone()
    expected_set[index] = -1.0
    with ListIndices():
        assert torch.equal(tensor[index], expected)
        tensor[index] = -1.0
    assert torch.equal(tensor, expected_set)


def test_a_list_is_copied_once():
    lists, tensor = ListIndices(), torch.zeros(4)
    for _ in range(3):
        with lists:
            tensor[[1, 2]] = 1.0
    assert [x.tolist() for x in lists._kept.values()] == [[1, 2]]
    with lists:
        tensor[[0, 2]] = 1.0
    assert len(lists._kept) == 2
