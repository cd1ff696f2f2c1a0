"""When a host whose connection was cut counts as lost."""

from monarch_nb.connect.remote_host import REFUSED_S, OutageTimer


def test_a_host_is_silent_one_lease_after_its_last_message() -> None:
    cut = OutageTimer(100.0, lease=60.0)
    assert [cut.silent(now, vouched=False) for now in (159.9, 160.0)] == [False, True]
    assert not cut.silent(161.0, vouched=True)
    assert not cut.silent(220.9, vouched=False)
    assert cut.silent(221.0, vouched=False)


def test_a_refusal_counts_if_it_lasts_and_the_peer_saw_it() -> None:
    cut = OutageTimer(100.0, lease=60.0)
    assert not cut.refused(100.0, listens=False)
    assert not cut.refused(100.0 + REFUSED_S - 0.1, listens=False)
    assert cut.refused(100.0 + REFUSED_S, listens=False)
    assert not cut.refused(106.0, listens=None), "nothing is seen of the other end"
    assert not cut.refused(110.0, listens=False)
    assert not cut.refused(112.0, listens=True), "it is back"
    assert not cut.refused(113.0, listens=False)
    assert not cut.refused(113.0 + REFUSED_S - 0.1, listens=False)


def test_a_refusal_need_not_last_longer_than_a_short_lease() -> None:
    cut = OutageTimer(0.0, lease=1.0)
    assert not cut.refused(0.0, listens=False)
    assert cut.refused(1.0, listens=False)
