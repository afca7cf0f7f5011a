import pytest

from convoy.errors import InputError
from convoy.measurement.protocol import Protocol, protocol_for
from convoy.settings import Effort


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_efforts_share_one_id_so_that_rows_carry_over(device):
    found = [protocol_for(effort, device) for effort in Effort]
    assert len({protocol.id for protocol in found}) == 1
    assert protocol_for(Effort.FULL, device).rounds > protocol_for(Effort.QUICK, device).rounds


def test_what_changes_the_meaning_of_a_sample_changes_the_id():
    ids = {
        Protocol("wall").id,
        Protocol("graph").id,
        Protocol("events").id,
        Protocol("wall", cold=False).id,
        Protocol("wall", min_sample_us=7).id,
    }
    assert len(ids) == 5
    assert Protocol("wall", rounds=99, few=1, prune_ratio=9.0).id == Protocol("wall").id


def test_an_id_is_what_the_database_takes():
    from convoy.perfdb.record import MAX_CHARACTERS

    for device in ("cpu", "cuda"):
        name = protocol_for("quick", device).id
        assert name.isascii()
        assert not set(name) & set(" \n\t")
        assert len(name) <= MAX_CHARACTERS["protocol"]


def test_thorough_allows_for_half_of_the_rounds_being_dropped():
    protocol = Protocol("wall", rounds=9, few=3)
    assert [protocol.is_thorough(samples) for samples in (1, 3, 4, 5, 9)] == [False, False, False, True, True]
    assert not protocol_for("full", "cpu").is_thorough(protocol_for("quick", "cpu").rounds)


@pytest.mark.parametrize(
    ("field", "value"),
    [("clock", "sundial"), ("few", 0), ("rounds", 0), ("min_sample_us", 0), ("prune_ratio", 1.0)],
)
def test_nonsense_is_refused_by_name(field, value):
    with pytest.raises(InputError, match=field):
        Protocol(**{"clock": "wall", field: value})


def test_unknown_devices_and_efforts_are_refused():
    with pytest.raises(InputError, match="device"):
        protocol_for("quick", "tpu")
    with pytest.raises(ValueError, match="lazy"):
        protocol_for("lazy", "cpu")


def test_earlier_versions_are_other_ids_of_the_same_clock():
    graph, wall = protocol_for("quick", "cuda"), protocol_for("quick", "cpu")
    assert graph.earlier == (graph.id.replace("v5", "v4"),)
    assert wall.earlier == (wall.id.replace("v5", "v4"),)
    assert Protocol("events").earlier == ()
