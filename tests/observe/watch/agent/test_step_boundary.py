from meshwright.observe.watch.agent.step_boundary import STRANGER_STEPS, StepBoundary


def test_the_first_optimizer_ends_steps_and_the_others_belong_to_them() -> None:
    lead = StepBoundary()
    ended = [lead.is_step_end(optimizer) for _ in range(3) for optimizer in (7, 8, 9)]
    assert ended == [True, False, False] * 3


def test_another_is_followed_when_the_first_is_seen_no_more() -> None:
    lead = StepBoundary()
    lead.is_step_end(7)
    ended = [lead.is_step_end(8) for _ in range(STRANGER_STEPS + 2)]
    assert ended.index(True) == STRANGER_STEPS - 1
    assert lead.is_step_end(8)
    assert not lead.is_step_end(7)


def test_a_graph_that_holds_the_optimizer_takes_its_place() -> None:
    lead = StepBoundary()
    assert lead.is_step_end(1)
    assert not any(lead.is_step_end(7, graph=True) for _ in range(STRANGER_STEPS - 1))
    assert all(lead.is_step_end(7, graph=True) for _ in range(3))


def test_a_graph_of_passes_is_a_part_of_its_optimizers_steps() -> None:
    lead = StepBoundary()
    for _ in range(100):
        assert not any(lead.is_step_end(7, graph=True) for _ in range(4))
        assert lead.is_step_end(1)
