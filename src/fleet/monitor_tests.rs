//! Tests of the monitors.

use proptest::prelude::*;

use super::*;

type All = Monitors<&'static str>;

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn state(active: &str, result: &str) -> UnitState {
    let pairs = [("ActiveState", active), ("SubState", active), ("Result", result)];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// One short line for each effect.
fn shown(effects: &[Effect<&'static str>]) -> Vec<String> {
    let show = |effect: &Effect<&'static str>| match effect {
        Effect::SubscribeOnNode { node, pattern } => format!("{node} subscribe {pattern}"),
        Effect::UnsubscribeOnNode { node, pattern } => format!("{node} unsubscribe {pattern}"),
        Effect::Signal { owner, monitor, node, systemd_unit, signal } => {
            let what = match signal {
                Signal::UnitNew(reason) => format!("new {reason}"),
                Signal::UnitRemoved(reason) => format!("removed {reason}"),
                Signal::UnitStateChanged { active, reason, .. } => format!("{active} {reason}"),
                Signal::UnitPropertiesChanged(state) => format!("properties {}", state["Result"]),
            };
            format!("{owner}:{monitor} {node} {systemd_unit} {what}")
        }
    };
    effects.iter().map(show).collect()
}

/// A manager with two nodes online.
fn online() -> All {
    let mut all = All::default();
    for name in ["n1", "n2"] {
        assert!(all.node_online(&node(name)).is_empty());
    }
    all
}

fn subscribe(all: &mut All, monitor: u32, scope: Scope, pattern: &str) -> (u32, Vec<String>) {
    let (id, effects) = all.subscribe(&"c", monitor, scope, &[pattern.to_owned()]).unwrap();
    (id, shown(&effects))
}

#[test]
fn a_subscription_sends_each_unit_first_and_each_change_once() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    let (_, effects) = subscribe(&mut all, monitor, Scope::Node(node("n1")), "a*");
    assert_eq!(effects, ["n1 subscribe a*"]);
    let n1 = node("n1");
    let first = shown(&all.unit_properties(&n1, "a.service", &state("active", "success")));
    assert_eq!(
        first,
        [
            "c:1 n1 a.service new virtual",
            "c:1 n1 a.service active virtual",
            "c:1 n1 a.service properties success"
        ]
    );
    assert!(all.unit_properties(&n1, "a.service", &state("active", "success")).is_empty());
    assert!(all.unit_properties(&n1, "b.service", &state("active", "success")).is_empty());
    assert!(all.unit_properties(&node("n2"), "a.service", &state("active", "success")).is_empty());
    let result = shown(&all.unit_properties(&n1, "a.service", &state("active", "timeout")));
    assert_eq!(result, ["c:1 n1 a.service properties timeout"]);
    let failed = shown(&all.unit_properties(&n1, "a.service", &state("failed", "timeout")));
    assert_eq!(failed, ["c:1 n1 a.service failed real", "c:1 n1 a.service properties timeout"]);
    assert_eq!(shown(&all.unit_removed(&n1, "a.service")), ["c:1 n1 a.service removed real"]);
    assert!(all.unit_removed(&n1, "a.service").is_empty());
    all.unit_new(&n1, "a.service");
    let loaded = shown(&all.unit_properties(&n1, "a.service", &state("inactive", "success")));
    assert_eq!(loaded[..2], ["c:1 n1 a.service new real", "c:1 n1 a.service inactive real"]);
}

#[test]
fn overlapping_subscriptions_cause_one_signal_and_a_new_one_sends_all_units_again() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    let other = all.create("c").unwrap();
    subscribe(&mut all, monitor, Scope::AllNodes, "*");
    let n1 = node("n1");
    all.unit_properties(&n1, "a.service", &state("active", "success"));
    let (_, effects) = subscribe(&mut all, monitor, Scope::Node(n1.clone()), "a.service");
    assert_eq!(effects, ["n1 subscribe a.service"]);
    let again = all.unit_properties(&n1, "a.service", &state("active", "success"));
    assert_eq!(shown(&again).len(), 3, "once for the new subscription, in spite of two that match");
    subscribe(&mut all, other, Scope::Node(n1.clone()), "a.service");
    let initial = shown(&all.unit_properties(&n1, "a.service", &state("active", "success")));
    assert!(initial.iter().all(|line| line.starts_with("c:2 ")) && initial.len() == 3, "{initial:?}");
    let changed = shown(&all.unit_properties(&n1, "a.service", &state("failed", "success")));
    assert_eq!(changed.len(), 4, "two signals for each monitor: {changed:?}");
}

#[test]
fn agents_stop_reporting_when_no_subscription_needs_a_pattern() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    let (everywhere, effects) = subscribe(&mut all, monitor, Scope::AllNodes, "a");
    assert_eq!(effects, ["n1 subscribe a", "n2 subscribe a"]);
    let (here, _) = subscribe(&mut all, monitor, Scope::Node(node("n1")), "a");
    subscribe(&mut all, monitor, Scope::Node(node("n1")), "a");
    let gone = all.unsubscribe(&"c", monitor, everywhere).unwrap();
    assert_eq!(shown(&gone), ["n2 unsubscribe a"]);
    assert!(all.unsubscribe(&"c", monitor, here).unwrap().is_empty());
    assert_eq!(all.unsubscribe(&"c", monitor, here), Err(Refused::NoSuchSubscription));
    let scope = Scope::Node(node("n1"));
    let gone = all.unsubscribe_by_name(&"c", monitor, &scope, "a").unwrap();
    assert_eq!(shown(&gone), ["n1 unsubscribe a"]);
    let none = all.unsubscribe_by_name(&"c", monitor, &scope, "a");
    assert_eq!(none, Err(Refused::NoSuchSubscription));
    subscribe(&mut all, monitor, Scope::AllNodes, "b");
    assert_eq!(shown(&all.close_all(&"c")), ["n1 unsubscribe b", "n2 unsubscribe b"]);
    assert!(all.monitors.is_empty() && all.wanted.is_empty());
}

#[test]
fn a_lost_node_removes_its_units_and_a_returning_one_sends_them_again() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    subscribe(&mut all, monitor, Scope::AllNodes, "*");
    for name in ["n1", "n2"] {
        all.unit_properties(&node(name), "a.service", &state("active", "success"));
    }
    assert_eq!(shown(&all.node_lost(&node("n1"))), ["c:1 n1 a.service removed virtual"]);
    assert!(all.node_lost(&node("n1")).is_empty());
    assert_eq!(shown(&all.node_online(&node("n1"))), ["n1 subscribe *"]);
    let back = shown(&all.unit_properties(&node("n1"), "a.service", &state("active", "success")));
    assert_eq!(back[0], "c:1 n1 a.service new virtual");
}

#[test]
fn monitors_belong_to_their_client_and_are_limited() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    assert_eq!(all.close(&"other", monitor), Err(Refused::NoSuchMonitor));
    let denied = all.subscribe(&"other", monitor, Scope::AllNodes, &["a".into()]);
    assert_eq!(denied, Err(Refused::NoSuchMonitor));
    for _ in 1..MAX_MONITORS {
        all.create("c").unwrap();
    }
    assert_eq!(all.create("c"), Err(Refused::TooManyMonitors));
    all.create("other").unwrap();
    let most = vec!["a".to_owned(); MAX_SUBSCRIPTIONS];
    all.subscribe(&"c", monitor, Scope::AllNodes, &most).unwrap();
    let more = all.subscribe(&"c", monitor, Scope::AllNodes, &["a".into()]);
    assert_eq!(more, Err(Refused::TooManySubscriptions));
}

#[derive(Debug, Clone)]
enum Event {
    Subscribe { monitor: u8, node: Option<u8>, pattern: u8 },
    Unsubscribe { monitor: u8, subscription: u32 },
    Online(u8),
    Lost(u8),
    Change { node: u8, unit: u8, value: u8 },
    Removed { node: u8, unit: u8 },
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => (0..2_u8, prop::option::of(0..2_u8), 0..4_u8)
            .prop_map(|(monitor, node, pattern)| Event::Subscribe { monitor, node, pattern }),
        1 => (0..2_u8, 1..12_u32)
            .prop_map(|(monitor, subscription)| Event::Unsubscribe { monitor, subscription }),
        2 => (0..2_u8).prop_map(Event::Online),
        1 => (0..2_u8).prop_map(Event::Lost),
        8 => (0..2_u8, 0..3_u8, 0..3_u8)
            .prop_map(|(node, unit, value)| Event::Change { node, unit, value }),
        1 => (0..2_u8, 0..3_u8).prop_map(|(node, unit)| Event::Removed { node, unit }),
    ];
    prop::collection::vec(event, 0..60)
}

/// Nodes as their agents see them: units and their values, and the set of subscribed patterns.
#[derive(Debug, Default)]
struct Nodes {
    units: BTreeMap<(NodeName, String), u8>,
    patterns: BTreeMap<NodeName, BTreeSet<String>>,
}

const PATTERNS: [&str; 4] = ["*", "u0", "u1", "u[12]"];

/// Executes effects as agents would: a subscription reports all matching units. Records the last
/// state that each monitor was sent.
fn execute(
    all: &mut All,
    nodes: &mut Nodes,
    shown: &mut BTreeMap<(u32, NodeName, String), UnitState>,
    effects: Vec<Effect<&'static str>>,
) {
    for effect in effects {
        match effect {
            Effect::SubscribeOnNode { node, pattern } => {
                nodes.patterns.get_mut(&node).expect("online").insert(pattern.clone());
                let glob = Glob::new(&pattern);
                let matching: Vec<_> =
                    nodes.units.iter().filter(|((of, unit), _)| *of == node && glob.matches(unit)).collect();
                let reports: Vec<_> = matching.into_iter().map(|((_, unit), v)| (unit.clone(), *v)).collect();
                for (unit, value) in reports {
                    let effects = all.unit_properties(&node, &unit, &state("active", &value.to_string()));
                    execute(all, nodes, shown, effects);
                }
            }
            Effect::UnsubscribeOnNode { node, pattern } => {
                let had = nodes.patterns.get_mut(&node).expect("online").remove(&pattern);
                assert!(had, "{node} has no subscription to {pattern}");
            }
            Effect::Signal { monitor, node, systemd_unit, signal, .. } => {
                let key = (monitor, node, systemd_unit);
                match signal {
                    Signal::UnitPropertiesChanged(now) => {
                        shown.insert(key, now);
                    }
                    Signal::UnitRemoved(_) => {
                        shown.remove(&key);
                    }
                    Signal::UnitNew(_) | Signal::UnitStateChanged { .. } => {}
                }
            }
        }
    }
}

proptest! {
    /// Every monitor was sent the current state of every matching unit, in any order of events.
    #[test]
    fn no_final_state_is_lost(events in events()) {
        let mut all = All::default();
        let (mut nodes, mut shown) = (Nodes::default(), BTreeMap::new());
        let monitors = [all.create("c").unwrap(), all.create("d").unwrap()];
        let owners = ["c", "d"];
        for event in events {
            let name = |n: u8| node(&format!("n{n}"));
            let effects = match event {
                Event::Subscribe { monitor, node, pattern } => {
                    let at = usize::from(monitor);
                    let scope = node.map_or(Scope::AllNodes, |n| Scope::Node(name(n)));
                    let patterns = [PATTERNS[usize::from(pattern)].to_owned()];
                    all.subscribe(&owners[at], monitors[at], scope, &patterns).unwrap().1
                }
                Event::Unsubscribe { monitor, subscription } => {
                    let at = usize::from(monitor);
                    all.unsubscribe(&owners[at], monitors[at], subscription).unwrap_or_default()
                }
                Event::Online(n) if nodes.patterns.contains_key(&name(n)) => Vec::new(),
                Event::Online(n) => {
                    nodes.patterns.insert(name(n), BTreeSet::new());
                    all.node_online(&name(n))
                }
                Event::Lost(n) => {
                    nodes.patterns.remove(&name(n));
                    all.node_lost(&name(n))
                }
                Event::Change { node: n, unit, value } => {
                    let unit = format!("u{unit}");
                    nodes.units.insert((name(n), unit.clone()), value);
                    let observed = nodes.patterns.get(&name(n)).is_some_and(|patterns| {
                        patterns.iter().any(|pattern| Glob::new(pattern).matches(&unit))
                    });
                    let now = state("active", &value.to_string());
                    if observed { all.unit_properties(&name(n), &unit, &now) } else { Vec::new() }
                }
                Event::Removed { node: n, unit } => {
                    let unit = format!("u{unit}");
                    nodes.units.remove(&(name(n), unit.clone()));
                    if nodes.patterns.contains_key(&name(n)) {
                        all.unit_removed(&name(n), &unit)
                    } else {
                        Vec::new()
                    }
                }
            };
            execute(&mut all, &mut nodes, &mut shown, effects);
            for ((of, unit), value) in &nodes.units {
                if !nodes.patterns.contains_key(of) {
                    continue;
                }
                for id in monitors {
                    if all.monitors[&id].matches(of, unit) {
                        let now = state("active", &value.to_string());
                        prop_assert_eq!(shown.get(&(id, of.clone(), unit.clone())), Some(&now));
                    }
                }
            }
        }
    }
}
