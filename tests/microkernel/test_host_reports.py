"""Reports of hosts: what is kept, passed on, written and forgotten. Over real TCP links."""

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.live.server import free_port
from tests.microkernel.tcp import Deployment, LoopedLink, hello, until
from tests.property.test_codec import messages
from tgi.microkernel import host_reports, rundir
from tgi.microkernel.host_reports import (
    EXPIRY_SECONDS,
    MAX_HOSTS,
    KnownReport,
    ReportExchange,
    cleaned,
    read_other_hosts,
    read_report,
    write_report,
)
from tgi.microkernel.process_table import HostSampler
from tgi.microkernel.protocol import HostLoad, HostReport, HostReports, ProcessRow, encode

LOAD = HostLoad(1, 2, 3, 4, 5, 6, 7.5, -1.0)
ROW = ProcessRow("worker-0", 42, "ready", "", 100, "ab", 1 << 20, 100, -1, "step 7", -1.0)


def report(site: str, age: float = 0.0) -> HostReport:
    made = int(1000 * (time.monotonic() - age))
    return HostReport(site, f"host-{site[:4]}", int(1000 * age), [ROW], LOAD, made)


def site_of(number: int) -> str:
    return f"{number:016x}"


class Site:
    """A host with one process that has one link to other hosts."""

    def __init__(self, directory: Path, link: LoopedLink) -> None:
        rundir.create_run_dir(directory)
        self.run = directory
        self.site = rundir.site_id(directory)
        self.link = link
        self.exchange = ReportExchange(directory, self.site)

    def publish(self) -> None:
        """As the supervisor does."""
        write_report(self.run, KnownReport(report(self.site), time.monotonic()))

    def knows(self) -> set[str]:
        self.exchange.exchange([self.link.link])
        return {one.site for one in read_other_hosts(self.run, self.site)}


def known_by(sites: list[Site]) -> list[set[str]]:
    return [site.knows() for site in sites]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path / "keys", free_port())
    yield made
    made.close()


@pytest.fixture
def sites(deployment: Deployment, tmp_path: Path) -> list[Site]:
    """A scheduler, a worker and a tokenizer on hosts of their own."""
    links = [
        deployment.bind(),
        deployment.connect(hello("worker")._replace(host_reports=True)),
        deployment.connect(hello("tokenizer")._replace(host_reports=True)),
    ]
    links[0].link.own_hello = links[0].link.own_hello._replace(host_reports=True)
    assert until(lambda: len(links[0].link.peers) == 2 and links[1].link.peers and links[2].link.peers, *links)
    return [Site(tmp_path / f"run{number}", link) for number, link in enumerate(links)]


def test_every_host_learns_of_all_others(sites: list[Site]) -> None:
    for site in sites:
        site.publish()
    everyone = {site.site for site in sites}
    links = [site.link for site in sites]
    assert until(lambda: known_by(sites) == [everyone - {site.site} for site in sites], *links)
    (seen,) = [one for one in read_other_hosts(sites[1].run, sites[1].site) if one.site == sites[2].site]
    assert seen._replace(age_ms=0, made_ms=0) == report(sites[2].site)._replace(made_ms=0)
    assert seen.age_ms < 1000 * EXPIRY_SECONDS


def test_nothing_is_sent_without_news(sites: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    for site in sites:
        site.publish()
    links = [site.link for site in sites]
    assert until(lambda: [*map(len, known_by(sites))] == [2, 2, 2], *links)
    sent = []
    for site in sites:
        monkeypatch.setattr(site.link.link, "send_host_reports", sent.append)
    until(lambda: [*map(len, known_by(sites))] != [2, 2, 2], *links, seconds=0.3)
    assert not sent


def test_a_host_without_news_is_forgotten(sites: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reports, "EXPIRY_SECONDS", 1.0)
    links = [site.link for site in sites]

    def known(publishing: list[Site]) -> list[int]:
        for site in publishing:
            site.publish()
        return [*map(len, known_by(sites))]

    assert until(lambda: known(sites) == [2, 2, 2], *links)
    assert until(lambda: known(sites[:2])[:2] == [1, 1], *links)


def test_a_peer_that_does_not_know_the_message_gets_none(deployment: Deployment, tmp_path: Path) -> None:
    low, old = deployment.bind(), deployment.connect(hello("worker"))
    assert until(lambda: low.link.peers and old.link.peers, low, old)
    site = Site(tmp_path / "run", low)
    site.publish()
    until(lambda: site.knows(), low, old, seconds=0.3)
    assert not old.link.take_host_reports()


def test_reports_come_from_other_hosts_only(tmp_path: Path) -> None:
    """Processes of this host are believed by their state files alone, and a peer cannot replace the own report."""
    site = rundir_with_site(tmp_path)
    exchange = ReportExchange(tmp_path, site)
    link = ScriptedLink([report(site)])
    exchange.exchange([link])  # type: ignore[list-item]
    assert read_report(tmp_path, site) is None
    link.is_between_hosts = False
    link.received = [report(site_of(1))]
    exchange.exchange([link])  # type: ignore[list-item]
    assert not read_other_hosts(tmp_path, site)


@dataclasses.dataclass
class ScriptedLink:
    """A link that has received these reports."""

    received: list[HostReport]
    is_between_hosts: bool = True
    sent: list[HostReports] = dataclasses.field(default_factory=list)
    peers: tuple[str, ...] = ("one", "other")
    deliver_to: "ScriptedLink | None" = None

    def take_host_reports(self) -> list[HostReports]:
        received, self.received = self.received, []
        return [HostReports(received)]

    def send_host_reports(self, message: HostReports) -> None:
        encode(message)
        self.sent.append(message)
        if self.deliver_to is not None:
            self.deliver_to.received += message.reports


def rundir_with_site(path: Path) -> str:
    rundir.create_run_dir(path)
    return rundir.site_id(path)


def test_processes_of_a_host_pass_on_what_others_of_it_have_received(tmp_path: Path) -> None:
    """As a tokenizer with front ends elsewhere, next to a scheduler whose worker is elsewhere."""
    site = rundir_with_site(tmp_path)
    scheduler, tokenizer = ReportExchange(tmp_path, site), ReportExchange(tmp_path, site)
    worker, front = ScriptedLink([report(site_of(1))]), ScriptedLink([])
    scheduler.exchange([worker])  # type: ignore[list-item]
    for _ in range(2):
        tokenizer.exchange([front])  # type: ignore[list-item]
        scheduler.exchange([worker])  # type: ignore[list-item]
    assert [one.site for message in front.sent for one in message.reports] == [site_of(1)]
    assert len(worker.sent) == 1  # it has other peers


def test_the_number_of_hosts_is_bounded(tmp_path: Path) -> None:
    site = rundir_with_site(tmp_path)
    exchange = ReportExchange(tmp_path, site)
    for first in (0, 50, 100):
        exchange.exchange([ScriptedLink([report(site_of(first + n)) for n in range(50)])])  # type: ignore[list-item]
    assert len(read_other_hosts(tmp_path, site)) == MAX_HOSTS
    assert len(list((tmp_path / "hosts").iterdir())) == MAX_HOSTS


def test_of_two_reports_the_newer_one_counts(tmp_path: Path) -> None:
    site = rundir_with_site(tmp_path)
    exchange = ReportExchange(tmp_path, site)
    # The third one is older, the last one the second over another way, which has taken time that its age lacks.
    for age, made, percent in ((5.0, 1000, 1), (2.0, 4000, 2), (0.5, 3000, 3), (1.0, 4000, 4)):
        row = ROW._replace(percent=percent)
        link = ScriptedLink([report(site_of(1), age)._replace(processes=[row], made_ms=made)])
        exchange.exchange([link])  # type: ignore[list-item]
    (kept,) = read_other_hosts(tmp_path, site)
    assert kept.processes[0].percent == 2
    assert kept.age_ms >= 2000


def test_a_report_does_not_go_round_in_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes with links to two others each, as two tokenizers and two schedulers have, take what they have
    received with their beats. The host whose report they have got ends."""
    now = 1000.0
    monkeypatch.setattr(host_reports.time, "monotonic", lambda: now)
    runs = [tmp_path / str(number) for number in range(4)]
    exchanges = [ReportExchange(run, rundir_with_site(run)) for run in runs]
    links = {(one, other): ScriptedLink([]) for one in range(4) for other in ((one + 1) % 4, (one - 1) % 4)}
    for (one, other), link in links.items():
        link.deliver_to = links[other, one]
    links[0, 1].received = [report(site_of(1))]
    sent = 0
    for _ in range(100):
        for number, exchange in enumerate(exchanges):
            own = [link for (one, _), link in links.items() if one == number]
            exchange.exchange(own)  # type: ignore[arg-type]
            now += 0.15
        sent, before = sum(len(link.sent) for link in links.values()), sent
        if now > 1000 + EXPIRY_SECONDS:
            assert sent == before
    assert not any(read_other_hosts(run, "") for run in runs)


hosts = st.builds(
    HostReport,
    st.sampled_from([site_of(1), site_of(2), "", "../../../etc/passwd"]),
    st.text(max_size=200) | st.just("\x1b[2J\n\udc80"),
    st.sampled_from([-1, 0, 1, 9_999, 10_001, 2**63]),
    st.lists(messages(ProcessRow), max_size=4),
    messages(HostLoad) | st.just(LOAD._replace(tokens_per_second=float("nan"), first_token_ms=float("inf"))),
)


@given(st.lists(st.lists(hosts | messages(HostReport), max_size=3), max_size=4))
def test_any_report_of_a_peer_is_harmless(received: list[list[HostReport]]) -> None:
    """It is refused, or can be passed on, and shown on a terminal and in JSON."""
    for reports in received:
        for one in reports:
            kept = cleaned(one)
            if kept is None:
                continue
            encode(HostReports([kept]))
            assert cleaned(kept) == kept
            texts = [kept.host, *(value for row in kept.processes for value in row if isinstance(value, str))]
            assert all(text.isprintable() and len(text) <= host_reports.MAX_TEXT for text in texts)
            numbers = [*kept.load, *(value for row in kept.processes for value in row)]
            assert all(-1 <= value <= 1 << 53 for value in numbers if isinstance(value, int | float))


def test_a_peer_that_invents_hosts_again_and_again_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports that expire as soon as they are accepted, from other hosts each time."""
    now = 1000.0
    monkeypatch.setattr(host_reports.time, "monotonic", lambda: now)
    exchange = ReportExchange(tmp_path, rundir_with_site(tmp_path))
    for first in range(0, 20 * MAX_HOSTS, MAX_HOSTS):
        invented = [report(site_of(first + n), EXPIRY_SECONDS) for n in range(MAX_HOSTS)]
        exchange.exchange([ScriptedLink(invented)])  # type: ignore[list-item]
        now += 0.5
    assert len(list((tmp_path / "hosts").iterdir())) <= MAX_HOSTS


@pytest.mark.parametrize("content", [b"", b"1234567", b"\0" * 8, b"\0" * 8 + b"\x91\x10", b"\xff" * 100])
def test_a_damaged_file_is_no_host(tmp_path: Path, content: bytes) -> None:
    rundir.create_run_dir(tmp_path)
    (tmp_path / "hosts" / site_of(1)).write_bytes(content)
    (tmp_path / "hosts" / "readme").write_bytes(content)
    assert read_other_hosts(tmp_path, "") == []


def test_files_of_hosts_that_are_gone_are_removed(tmp_path: Path) -> None:
    rundir.create_run_dir(tmp_path)
    for number in (1, 2):
        write_report(tmp_path, KnownReport(report(site_of(number)), time.monotonic()))
    old = tmp_path / "hosts" / site_of(1)
    os.utime(old, (time.time() - 60, time.time() - 60))
    host_reports.remove_expired_files(tmp_path)
    assert [path.name for path in (tmp_path / "hosts").iterdir()] == [site_of(2)]


def test_a_run_directory_without_a_server_has_no_processes(tmp_path: Path) -> None:
    rundir.create_run_dir(tmp_path)
    assert HostSampler(tmp_path).sample().processes == []
