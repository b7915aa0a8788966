"""A report says what was seen, what it costs and what to change."""

from meshwright.fleet.patterns import FleetFinding, write_owner_report, write_owner_reports


def told(name: str, owner: str, hours: float | None, money: float | None = None) -> FleetFinding:
    return FleetFinding(
        name=name, title=name.capitalize(), evidence=(f"{name} was seen",), remedy=f"mend {name}",
        gpu_share=None, family="idle", gpu_hours=hours, dollars=money, owner=owner, team="lab",
        cases=1, jobs=("1", "2"), users=(owner,), nodes=(), cost_basis="measured: hours",
    )  # fmt: skip


def test_a_report_holds_everything_its_owner_needs() -> None:
    text = write_owner_report(
        "ada", [told("small", "ada", 2.0, 4.0), told("large", "ada", 30.0, 60.0)], "May"
    )
    assert text.startswith(
        "To: ada\nSubject: 2 ways to save GPU-hours (32 GPU-hours, about $64, May)"
    )
    assert text.index("1. Large: 30 GPU-hours, $60") < text.index("2. Small")
    for said in ("large was seen", "mend large", "measured: hours", "jobs: 1, 2", "say why"):
        assert said in text


def test_everybody_gets_one_report() -> None:
    found = write_owner_reports(
        [told("a", "ada", 1), told("b", "bob", 1), told("c", "ada", None)], "May"
    )
    assert list(found) == ["ada", "bob"]
    assert "bob" not in found["ada"]


def test_what_has_no_known_owner_goes_to_the_operators() -> None:
    found = write_owner_reports([told("a", "unknown", 1), told("b", "operators", 1)], "May")
    assert list(found) == ["operators"]
    assert found["operators"].startswith("To: operators\n")
    assert found["operators"].count("no owner is known") == 1
