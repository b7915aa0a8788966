from meshwright.observe.watch.agent.lead import STRANGER_STEPS, Lead


def test_the_first_optimizer_ends_steps_and_the_others_belong_to_them() -> None:
    lead = Lead()
    ended = [lead.ends_step(optimizer) for _ in range(3) for optimizer in (7, 8, 9)]
    assert ended == [True, False, False] * 3


def test_another_is_followed_when_the_first_is_seen_no_more() -> None:
    lead = Lead()
    lead.ends_step(7)
    ended = [lead.ends_step(8) for _ in range(STRANGER_STEPS + 2)]
    assert ended.index(True) == STRANGER_STEPS - 1
    assert lead.ends_step(8)
    assert not lead.ends_step(7)


def test_a_graph_that_holds_the_optimizer_takes_its_place() -> None:
    lead = Lead()
    assert lead.ends_step(1)
    assert not any(lead.ends_step(7, graph=True) for _ in range(STRANGER_STEPS - 1))
    assert all(lead.ends_step(7, graph=True) for _ in range(3))


def test_a_graph_of_passes_is_a_part_of_its_optimizers_steps() -> None:
    lead = Lead()
    for _ in range(100):
        assert not any(lead.ends_step(7, graph=True) for _ in range(4))
        assert lead.ends_step(1)
