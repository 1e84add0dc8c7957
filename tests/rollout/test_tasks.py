from forge_composer.rollout.tasks import TaskOrder


def test_each_epoch_is_a_permutation_and_depends_on_the_seed_alone() -> None:
    order = TaskOrder(50, seed=3)
    first, second = [order[i] for i in range(50)], [order[i] for i in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert [TaskOrder(50, seed=3)[i] for i in (99, 0, 57)] == [second[49], first[0], second[7]]
    assert [TaskOrder(50, seed=4)[i] for i in range(50)] != first
