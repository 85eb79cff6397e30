"""pyhirte, hirte's own client, against a manager whose bus is the system bus of this process. The
manager has three nodes that are online, `n1` to `n3`, and one that is not, `absent`. The nodes have the
units of tests/fleet/units."""

import os

import pytest
from dasbus.error import DBusError
from dasbus.loop import EventLoop
from gi.repository import GLib
from pyhirte.api import Job, Manager, Monitor, Node
from pyhirte.ext import Unit

# The file that slow.service waits for.
GO = os.environ["GO"]


class Events:
    """Collects the arguments of signals."""

    def __init__(self):
        self.seen = []

    def add(self, *arguments):
        self.seen.append(arguments)

    def wait(self, condition):
        """Handles signals until one of them satisfies the condition, and returns it."""
        loop = EventLoop()

        def poll():
            if any(condition(event) for event in self.seen):
                loop.quit()
            return True

        source = GLib.timeout_add(5, poll)
        limit = GLib.timeout_add_seconds(60, loop.quit)
        loop.run()
        GLib.source_remove(source)
        found = [event for event in self.seen if condition(event)]
        assert found, f"the signal did not come; these did: {self.seen}"
        GLib.source_remove(limit)
        return found[0]


def active(node, unit):
    return node.get_unit_property(unit, "org.freedesktop.systemd1.Unit", "ActiveState").unpack()


@pytest.fixture
def node():
    return Node("n1")


def test_nodes_are_listed():
    nodes = {name: (path, status) for name, path, status in Manager().list_nodes()}
    assert {name: status for name, (_, status) in nodes.items()} == {
        "n1": "online",
        "n2": "online",
        "n3": "online",
        "absent": "offline",
    }
    for name, (path, _) in nodes.items():
        assert Manager().get_node(name) == path
    for name in nodes:
        # These return nothing, but they read the properties.
        other = Node(name)
        other.get_name(), other.get_status(), other.get_last_seen_timestamp()


def test_units_are_listed():
    rows = Manager().list_units()
    assert {row[0] for row in rows} == {"n1", "n2", "n3"}
    assert all(len(row) == 11 for row in rows)
    rows = Node("n2").list_units()
    assert all(len(row) == 10 for row in rows)
    assert "basic.target" in {row[0] for row in rows}


def test_jobs_report_their_results(node):
    unit = Unit("n1")
    assert unit.start_unit("quick.service") == "done"
    assert active(node, "quick.service") == "active"
    assert active(Node("n2"), "quick.service") == "inactive"
    assert unit.restart_unit("quick.service") == "done"
    assert unit.reload_unit("quick.service") == "done"
    assert unit.stop_unit("quick.service") == "done"
    assert active(node, "quick.service") == "inactive"
    assert unit.start_unit("failing.service") == "failed"
    assert unit.start_unit("dependent.service") == "dependency"
    assert unit.start_unit("timeout.service") == "timeout"


def test_a_job_is_visible_until_it_ends(node):
    created, removed = Events(), Events()
    manager = Manager()
    manager.on_job_new(created.add)
    manager.on_job_removed(removed.add)
    path = node.start_unit("slow.service", "replace")
    number, _, *where = created.wait(lambda event: event[1] == path)
    assert where == ["n1", "slow.service"]
    job = Job(path)
    job.get_id(), job.get_node(), job.get_unit(), job.get_job_type(), job.get_state()
    job.cancel()
    end = removed.wait(lambda event: event[1] == path)
    assert end == (number, path, "n1", "slow.service", "cancelled")
    with pytest.raises((DBusError, AttributeError)):
        Job(path).cancel()
    # A job that is not cancelled ends when the unit has started.
    path = node.start_unit("slow.service", "fail")
    created.wait(lambda event: event[1] == path)
    with open(GO, "w"):
        pass
    assert removed.wait(lambda event: event[1] == path)[4] == "done"
    assert Unit("n1").stop_unit("slow.service") == "done"
    os.remove(GO)
    for path in {event[1] for event in created.seen}:
        assert [event[1] for event in removed.seen].count(path) == 1


def test_a_monitor_reports_changes(node):
    states, properties, new = Events(), Events(), Events()
    monitor = Monitor(Manager().create_monitor())
    monitor.on_unit_state_changed(states.add)
    monitor.on_unit_properties_changed(properties.add)
    monitor.on_unit_new(new.add)
    monitor.on_unit_removed(lambda *_: None)
    subscription = monitor.subscribe("n1", "quick.service")
    unit = Unit("n1")
    assert unit.start_unit("quick.service") == "done"
    states.wait(lambda event: event == ("n1", "quick.service", "active", "running", "real"))
    changed = properties.wait(lambda event: event[2]["ActiveState"].unpack() == "active")
    assert changed[:2] == ("n1", "quick.service")
    assert {"LoadState", "ActiveState", "SubState", "UnitFileState", "Result"} <= set(changed[2])
    monitor.unsubscribe(subscription)
    listed = monitor.subscribe_list(("n1", ["quick.service", "templated@3.service"]))
    assert listed != subscription
    states.seen.clear()
    assert unit.stop_unit("quick.service") == "done"
    states.wait(lambda event: event[1:4] == ("quick.service", "inactive", "dead"))
    assert unit.start_unit("templated@3.service") == "done"
    states.wait(lambda event: event[1:3] == ("templated@3.service", "active"))
    assert unit.stop_unit("templated@3.service") == "done"
    monitor.close()
    with pytest.raises((DBusError, AttributeError)):
        Monitor(monitor.monitor_path).close()


def test_unit_files_are_enabled_and_disabled():
    unit = Unit("n1")
    response = unit.enable_unit_files(["quick.service"])
    assert response.carries_install_info
    assert [change.change_type for change in response.changes] == ["symlink"]
    assert response.changes[0].symlink_file.endswith("/quick.service")
    unit.node.reload()
    changes = unit.disable_unit_files(["quick.service"])
    assert [change.change_type for change in changes] == ["unlink"]


def test_properties_are_read_and_set(node):
    service = "org.freedesktop.systemd1.Service"
    node.set_unit_properties("quick.service", True, [("MemoryMax", GLib.Variant("t", 1 << 30))])
    assert node.get_unit_property("quick.service", service, "MemoryMax").unpack() == 1 << 30
    every = node.get_unit_properties("quick.service", service)
    assert every["MemoryMax"].unpack() == 1 << 30


def test_errors_have_the_names_of_systemd(node):
    for call, name in [
        (lambda: node.start_unit("missing.service", "replace"), "org.freedesktop.systemd1.NoSuchUnit"),
        (lambda: node.start_unit("quick.service", "sometimes"), "org.freedesktop.DBus.Error.InvalidArgs"),
        (lambda: Node("unknown").start_unit("a.service", "fail"), "org.containers.hirte.NoSuchNode"),
        (lambda: Node("absent").start_unit("a.service", "fail"), "org.containers.hirte.Offline"),
        (lambda: Manager().set_log_level("sometimes"), "org.freedesktop.DBus.Error.InvalidArgs"),
    ]:
        with pytest.raises(DBusError) as caught:
            call()
        assert caught.value.dbus_name == name, caught.value
