//! The interfaces of the public API, and those of every object. Pure.

use super::MethodEffect::{Changes, Reads};
use super::{Argument, Interface, Method, MethodEffect, Property, Signal};
use crate::fleet::dbus::names;

const fn method(
    name: &'static str,
    effect: MethodEffect,
    input: &'static [Argument],
    output: &'static [Argument],
    about: &'static str,
) -> Method {
    Method { name, input, output, also: &[], effect, about }
}

const fn signal(name: &'static str, arguments: &'static [Argument], about: &'static str) -> Signal {
    Signal { name, arguments, about }
}

const fn property(name: &'static str, signature: &'static str, about: &'static str) -> Property {
    Property { name, signature, is_constant: false, about }
}

const fn constant(name: &'static str, signature: &'static str, about: &'static str) -> Property {
    Property { name, signature, is_constant: true, about }
}

const NODE_ARG: Argument = ("node", "s");
const UNIT: Argument = ("unit", "s");
const NAME: Argument = ("name", "s");
const MODE: Argument = ("mode", "s");
const REASON: Argument = ("reason", "s");
const JOB_OUT: &[Argument] = &[("job", "o")];
const CHANGES_OUT: Argument = ("changes", "a(sss)");
const UNITS: Argument = ("units", "a(ssssssouso)");

pub const MANAGER: Interface = Interface {
    name: names::MANAGER_INTERFACE,
    path: names::MANAGER_PATH,
    about: "The manager: all nodes together.",
    methods: &[
        method(
            "ListUnits",
            Reads,
            &[],
            &[("units", "a(sssssssouso)")],
            "Returns the loaded systemd units of all nodes that are online: the node, then the fields of \
             systemd's `ListUnits`.",
        ),
        method(
            "ListUnitFiles",
            Reads,
            &[],
            &[("files", "a(sss)")],
            "Returns the unit files of all nodes that are online: node, path, state.",
        ),
        method(
            "ListNodes",
            Reads,
            &[],
            &[("nodes", "a(sos)")],
            "Returns name, object path and status of every node.",
        ),
        method(
            "ListProxies",
            Reads,
            &[],
            &[("proxies", "a(sssssts)")],
            "Returns all proxy services, and those that failed or ended: source node, name, target node, \
             unit, state (`waiting`, `active`, `failed` or `stopped`), since when in microseconds since \
             1970, and the reason of a failure or an end.",
        ),
        method("GetNode", Reads, &[NAME], &[("path", "o")], "Returns the object path of a node."),
        method(
            "CreateMonitor",
            Reads,
            &[],
            &[("monitor", "o")],
            "Creates a monitor for the calling client. It is closed when the client's connection to the bus \
             ends.",
        ),
        method(
            "SetLogLevel",
            Changes,
            &[("level", "s")],
            &[],
            "Sets the log level of the manager: `debug`, `info`, `warn` or `error`.",
        ),
    ],
    signals: &[
        signal("JobNew", &[("id", "u"), ("job", "o"), ("nodeName", "s"), UNIT], "A job was queued."),
        signal(
            "JobRemoved",
            &[("id", "u"), ("job", "o"), ("nodeName", "s"), UNIT, ("result", "s")],
            "A job ended. The result is `done`, `failed`, `cancelled`, `timeout`, `dependency` or `skipped`. \
             Every job ends with exactly one such signal.",
        ),
        signal("NodeConnectionStateChanged", &[NODE_ARG, ("status", "s")], "A node went online or offline."),
    ],
    properties: &[
        property("Nodes", "as", "The names of all nodes, connected or not."),
        property("Status", "s", "`up` if all nodes are online, `down` if none is, else `degraded`."),
    ],
};

pub const MONITOR: Interface = Interface {
    name: names::MONITOR_INTERFACE,
    path: "/org/containers/hirte/monitor/$id",
    about: "A monitor reports changes of systemd units to the client that created it.",
    methods: &[
        method("Close", Reads, &[], &[], "Deletes the monitor and its subscriptions."),
        method(
            "Subscribe",
            Reads,
            &[NODE_ARG, UNIT],
            &[("id", "u")],
            "Subscribes to the units of a node whose name matches. An empty node name or `*` means all \
             nodes, and the unit may be a glob. One signal is sent for every unit that matches, and then \
             one for every change.",
        ),
        Method {
            name: "SubscribeList",
            input: &[("targets", "(sas)")],
            output: &[("id", "u")],
            also: &[],
            effect: Reads,
            about: "Subscribes to several units of a node at once. Node and units may also be two arguments.",
        },
        Method {
            name: "Unsubscribe",
            input: &[("id", "u")],
            output: &[],
            also: &["ss"],
            effect: Reads,
            about: "Removes a subscription: by the id that `Subscribe` returned, or by the node and the \
                    unit, as two strings.",
        },
    ],
    signals: &[
        signal(
            "UnitNew",
            &[NODE_ARG, UNIT, REASON],
            "A unit was loaded (`real`), or is reported for the first time (`virtual`).",
        ),
        signal(
            "UnitRemoved",
            &[NODE_ARG, UNIT, REASON],
            "A unit was unloaded (`real`), or its node was lost (`virtual`).",
        ),
        signal(
            "UnitStateChanged",
            &[NODE_ARG, UNIT, ("activeState", "s"), ("subState", "s"), REASON],
            "The active state or the sub state changed (`real`), or is reported for the first time \
             (`virtual`).",
        ),
        signal(
            "UnitPropertiesChanged",
            &[NODE_ARG, UNIT, ("properties", "a{sv}")],
            "A property changed, or is reported for the first time. The signal has LoadState, ActiveState, \
             SubState, UnitFileState and, if the unit has it, Result.",
        ),
    ],
    properties: &[],
};

pub const NODE: Interface = Interface {
    name: names::NODE_INTERFACE,
    path: "/org/containers/hirte/node/$name",
    about: "A node: systemd on one machine. The object exists also while the node is offline; its methods \
            then fail with `org.containers.hirte.Offline`.",
    methods: &[
        method(
            "StartUnit",
            Changes,
            &[NAME, MODE],
            JOB_OUT,
            "Queues a job that starts a unit. One job of a unit runs at a time, and at most one is queued. \
             With the mode `replace`, a queued job is cancelled; with `fail`, the call fails then.",
        ),
        method("StopUnit", Changes, &[NAME, MODE], JOB_OUT, "Queues a job that stops a unit."),
        method("ReloadUnit", Changes, &[NAME, MODE], JOB_OUT, "Queues a job that reloads a unit."),
        method("RestartUnit", Changes, &[NAME, MODE], JOB_OUT, "Queues a job that restarts a unit."),
        method(
            "StartTransientUnit",
            Changes,
            &[NAME, MODE, ("properties", "a(sv)"), ("aux", "a(sa(sv))")],
            JOB_OUT,
            "Queues a job that creates and starts a transient unit.",
        ),
        method(
            "KillUnit",
            Changes,
            &[NAME, ("who", "s"), ("signal", "i")],
            &[],
            "Sends a signal to processes of a unit.",
        ),
        method("FreezeUnit", Changes, &[NAME], &[], "Freezes a unit."),
        method("ThawUnit", Changes, &[NAME], &[], "Thaws a unit."),
        Method {
            name: "GetUnitProperties",
            input: &[NAME, ("interface", "s")],
            output: &[("properties", "a{sv}")],
            also: &["s"],
            effect: Reads,
            about: "Returns LoadState, ActiveState, SubState, UnitFileState and Result of a unit. With the \
                    name of one of systemd's interfaces as second argument, all properties of it.",
        },
        method(
            "GetUnitProperty",
            Reads,
            &[NAME, ("interface", "s"), ("property", "s")],
            &[("value", "v")],
            "Returns one property of a unit.",
        ),
        method(
            "SetUnitProperties",
            Changes,
            &[NAME, ("runtime", "b"), ("properties", "a(sv)")],
            &[],
            "Sets properties of a unit.",
        ),
        method(
            "ListUnits",
            Reads,
            &[],
            &[UNITS],
            "Returns the loaded units, with the fields of systemd's `ListUnits`.",
        ),
        method(
            "ReadJournal",
            Changes,
            &[NAME, ("entries", "u"), ("cursor", "s")],
            &[("entries", "as")],
            "Returns the last entries of a unit's journal, at most 10000, each as an object in JSON. With a \
             cursor, the value of `__CURSOR` of an entry, only the entries that follow it. Entries may \
             contain secrets, so not every client may read them.",
        ),
        method("ListUnitFiles", Reads, &[], &[("files", "a(ss)")], "Returns the unit files: path and state."),
        method(
            "GetUnitFileState",
            Reads,
            &[("file", "s")],
            &[("state", "s")],
            "Returns the state of a unit file.",
        ),
        method(
            "EnableUnitFiles",
            Changes,
            &[("files", "as"), ("runtime", "b"), ("force", "b")],
            &[("has_install_info", "b"), CHANGES_OUT],
            "Enables unit files.",
        ),
        method(
            "DisableUnitFiles",
            Changes,
            &[("files", "as"), ("runtime", "b")],
            &[CHANGES_OUT],
            "Disables unit files.",
        ),
        method("Reload", Changes, &[], &[], "Reads all unit files again, as `systemctl daemon-reload` does."),
        method("ResetFailed", Changes, &[], &[], "Resets the failed state of all units."),
        method("ResetFailedUnit", Changes, &[NAME], &[], "Resets the failed state of a unit."),
        method("GetDefaultTarget", Reads, &[], &[NAME], "Returns the default target."),
        method(
            "SetDefaultTarget",
            Changes,
            &[NAME, ("force", "b")],
            &[CHANGES_OUT],
            "Sets the default target.",
        ),
    ],
    signals: &[],
    properties: &[
        constant("Name", "s", "The name of the node."),
        property("Status", "s", "`online` or `offline`."),
        property("PeerIp", "s", "The address of the connected agent; empty while the node is offline."),
        property(
            "LastSeenTimestamp",
            "t",
            "When the agent last sent something, in microseconds since 1970; 0 if it never did. While the \
             node is online, it is at most ten seconds old.",
        ),
    ],
};

pub const JOB: Interface = Interface {
    name: names::JOB_INTERFACE,
    path: "/org/containers/hirte/job/$id",
    about: "A job that is queued or running. The object is gone when the job ends.",
    methods: &[method("Cancel", Changes, &[], &[], "Cancels the job.")],
    signals: &[],
    properties: &[
        constant("Id", "u", "The id of the job."),
        constant("Node", "s", "The node of the job."),
        constant("Unit", "s", "The systemd unit of the job."),
        constant("JobType", "s", "`Start`, `Stop`, `Reload` or `Restart`."),
        property("State", "s", "`waiting` or `running`."),
    ],
};

pub const INTROSPECTABLE: Interface = Interface {
    name: "org.freedesktop.DBus.Introspectable",
    path: "",
    about: "",
    methods: &[method("Introspect", Reads, &[], &[("xml_data", "s")], "")],
    signals: &[],
    properties: &[],
};

pub const PEER: Interface = Interface {
    name: "org.freedesktop.DBus.Peer",
    path: "",
    about: "",
    methods: &[
        method("Ping", Reads, &[], &[], ""),
        method("GetMachineId", Reads, &[], &[("machine_uuid", "s")], ""),
    ],
    signals: &[],
    properties: &[],
};

pub const PROPERTIES: Interface = Interface {
    name: "org.freedesktop.DBus.Properties",
    path: "",
    about: "",
    methods: &[
        method("Get", Reads, &[("interface", "s"), ("property", "s")], &[("value", "v")], ""),
        method("GetAll", Reads, &[("interface", "s")], &[("properties", "a{sv}")], ""),
        method("Set", Reads, &[("interface", "s"), ("property", "s"), ("value", "v")], &[], ""),
    ],
    signals: &[signal(
        "PropertiesChanged",
        &[("interface", "s"), ("changed", "a{sv}"), ("invalidated", "as")],
        "",
    )],
    properties: &[],
};
