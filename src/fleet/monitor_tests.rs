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
fn shown(effects: &[Effect]) -> Vec<String> {
    let show = |effect: &Effect| match effect {
        Effect::SubscribeOnNode { node, pattern } => format!("{node} subscribe {pattern}"),
        Effect::UnsubscribeOnNode { node, pattern } => format!("{node} unsubscribe {pattern}"),
    };
    effects.iter().map(show).collect()
}

/// Takes all signals. Returns one short line for each.
fn sent(all: &mut All) -> Vec<String> {
    let mut lines = Vec::new();
    while let Some(Outgoing { owner, monitor, node, systemd_unit, signals }) = all.next_signals(|_| true) {
        for signal in signals {
            let what = match signal {
                Signal::UnitNew(reason) => format!("new {reason}"),
                Signal::UnitRemoved(reason) => format!("removed {reason}"),
                Signal::UnitStateChanged { active, reason, .. } => format!("{active} {reason}"),
                Signal::UnitPropertiesChanged(state) => format!("properties {}", state["Result"]),
            };
            lines.push(format!("{owner}:{monitor} {node} {systemd_unit} {what}"));
        }
    }
    lines
}

/// Handles a report, and returns the signals that it causes.
fn report(all: &mut All, node: &NodeName, systemd_unit: &str, state: UnitState) -> Vec<String> {
    all.unit_properties(node, systemd_unit, state);
    sent(all)
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
    let first = report(&mut all, &n1, "a.service", state("active", "success"));
    assert_eq!(
        first,
        [
            "c:1 n1 a.service new virtual",
            "c:1 n1 a.service active virtual",
            "c:1 n1 a.service properties success"
        ]
    );
    assert!(report(&mut all, &n1, "a.service", state("active", "success")).is_empty());
    assert!(report(&mut all, &n1, "b.service", state("active", "success")).is_empty());
    assert!(report(&mut all, &node("n2"), "a.service", state("active", "success")).is_empty());
    let result = report(&mut all, &n1, "a.service", state("active", "timeout"));
    assert_eq!(result, ["c:1 n1 a.service properties timeout"]);
    let failed = report(&mut all, &n1, "a.service", state("failed", "timeout"));
    assert_eq!(failed, ["c:1 n1 a.service failed real", "c:1 n1 a.service properties timeout"]);
    all.unit_removed(&n1, "a.service");
    assert_eq!(sent(&mut all), ["c:1 n1 a.service removed real"]);
    all.unit_removed(&n1, "a.service");
    assert!(sent(&mut all).is_empty());
    all.unit_new(&n1, "a.service");
    let loaded = report(&mut all, &n1, "a.service", state("inactive", "success"));
    assert_eq!(loaded[..2], ["c:1 n1 a.service new real", "c:1 n1 a.service inactive real"]);
}

#[test]
fn changes_that_wait_for_room_are_combined_and_the_last_state_is_sent() {
    let mut all = online();
    let n1 = node("n1");
    for owner in ["slow", "fast"] {
        let monitor = all.create(owner).unwrap();
        all.subscribe(&owner, monitor, Scope::AllNodes, &["*".to_owned()]).unwrap();
    }
    for active in ["active", "failed", "inactive"] {
        for unit in ["a", "b"] {
            all.unit_properties(&n1, unit, state(active, "success"));
        }
        while let Some(outgoing) = all.next_signals(|owner| *owner == "fast") {
            assert_eq!(outgoing.owner, "fast");
        }
    }
    assert_eq!(all.waiting().copied().collect::<Vec<_>>(), ["slow"]);
    all.unit_removed(&n1, "b");
    while all.next_signals(|owner| *owner == "fast").is_some() {}
    let last = sent(&mut all);
    let expected = ["new virtual", "inactive virtual", "properties success"];
    assert_eq!(last, expected.map(|what| format!("slow:1 n1 a {what}")), "b was never sent");
    // Waiting changes of a unit that the client has.
    all.unit_removed(&n1, "a");
    all.unit_properties(&n1, "a", state("active", "success"));
    all.unit_removed(&n1, "a");
    let removed = sent(&mut all);
    assert_eq!(removed, ["fast:2 n1 a removed real", "slow:1 n1 a removed real"]);
    assert_eq!(all.waiting().count(), 0);
}

#[test]
fn monitors_share_states_and_a_node_may_have_a_limited_number_of_units() {
    let mut all = online();
    let n1 = node("n1");
    let monitors = [all.create("c").unwrap(), all.create("c").unwrap()];
    for monitor in monitors {
        subscribe(&mut all, monitor, Scope::AllNodes, "*");
    }
    report(&mut all, &n1, "a", state("active", "success"));
    report(&mut all, &n1, "a", state("active", "success"));
    let key = (n1.clone(), "a".to_owned());
    let [one, two] = monitors.map(|id| Arc::clone(&all.monitors[&id].sent[&key].state));
    assert!(Arc::ptr_eq(&one, &two));
    for at in 1..MAX_UNITS {
        all.unit_properties(&n1, &format!("{at}"), state("active", "success"));
    }
    sent(&mut all);
    assert!(report(&mut all, &n1, "more", state("active", "success")).is_empty());
    assert_eq!(report(&mut all, &n1, "a", state("failed", "success")).len(), 4);
    assert_eq!(report(&mut all, &node("n2"), "more", state("active", "success")).len(), 6);
}

#[test]
fn overlapping_subscriptions_cause_one_signal_and_a_new_one_sends_all_units_again() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    let other = all.create("c").unwrap();
    subscribe(&mut all, monitor, Scope::AllNodes, "*");
    let n1 = node("n1");
    report(&mut all, &n1, "a.service", state("active", "success"));
    let (_, effects) = subscribe(&mut all, monitor, Scope::Node(n1.clone()), "a.service");
    assert_eq!(effects, ["n1 subscribe a.service"]);
    let again = report(&mut all, &n1, "a.service", state("active", "success"));
    assert_eq!(again.len(), 3, "once for the new subscription, in spite of two that match");
    subscribe(&mut all, other, Scope::Node(n1.clone()), "a.service");
    let initial = report(&mut all, &n1, "a.service", state("active", "success"));
    assert!(initial.iter().all(|line| line.starts_with("c:2 ")) && initial.len() == 3, "{initial:?}");
    let changed = report(&mut all, &n1, "a.service", state("failed", "success"));
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
    assert!(all.monitors.is_empty() && all.wanted.on(&node("n1")).is_empty());
}

#[test]
fn a_lost_node_removes_its_units_and_a_returning_one_sends_them_again() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    subscribe(&mut all, monitor, Scope::AllNodes, "*");
    for name in ["n1", "n2"] {
        report(&mut all, &node(name), "a.service", state("active", "success"));
    }
    all.node_lost(&node("n1"));
    assert_eq!(sent(&mut all), ["c:1 n1 a.service removed virtual"]);
    all.node_lost(&node("n1"));
    assert!(sent(&mut all).is_empty());
    assert_eq!(shown(&all.node_online(&node("n1"))), ["n1 subscribe *"]);
    let back = report(&mut all, &node("n1"), "a.service", state("active", "success"));
    assert_eq!(back[0], "c:1 n1 a.service new virtual");
}

#[test]
fn a_unit_that_is_gone_before_the_report_for_a_new_subscription_is_removed() {
    let mut all = online();
    let monitor = all.create("c").unwrap();
    subscribe(&mut all, monitor, Scope::AllNodes, "*");
    for name in ["n1", "n2"] {
        report(&mut all, &node(name), "a.service", state("active", "success"));
    }
    subscribe(&mut all, monitor, Scope::AllNodes, "a*");
    all.unit_removed(&node("n1"), "a.service");
    all.node_lost(&node("n2"));
    let removed = ["c:1 n1 a.service removed real", "c:1 n2 a.service removed virtual"];
    assert_eq!(sent(&mut all), removed);
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

#[derive(Debug, Clone, Copy)]
enum Event {
    Subscribe {
        monitor: u8,
        node: Option<u8>,
        pattern: u8,
    },
    Unsubscribe {
        monitor: u8,
        subscription: u32,
    },
    Online(u8),
    Lost(u8),
    Change {
        node: u8,
        unit: u8,
        value: u8,
    },
    Removed {
        node: u8,
        unit: u8,
    },
    /// The agent of a node handles the oldest request of the manager.
    Request(u8),
    /// The manager handles the oldest report of a node.
    Report(u8),
    /// The client of a monitor has room for the signals of one unit.
    Room(u8),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        3 => (0..2_u8, prop::option::of(0..2_u8), 0..4_u8)
            .prop_map(|(monitor, node, pattern)| Event::Subscribe { monitor, node, pattern }),
        1 => (0..2_u8, 1..12_u32)
            .prop_map(|(monitor, subscription)| Event::Unsubscribe { monitor, subscription }),
        2 => (0..2_u8).prop_map(Event::Online),
        1 => (0..2_u8).prop_map(Event::Lost),
        6 => (0..2_u8, 0..3_u8, 0..3_u8)
            .prop_map(|(node, unit, value)| Event::Change { node, unit, value }),
        2 => (0..2_u8, 0..3_u8).prop_map(|(node, unit)| Event::Removed { node, unit }),
        4 => (0..2_u8).prop_map(Event::Request),
        8 => (0..2_u8).prop_map(Event::Report),
        6 => (0..2_u8).prop_map(Event::Room),
    ];
    prop::collection::vec(event, 0..100)
}

const PATTERNS: [&str; 4] = ["*", "u0", "u1", "u[12]"];
const OWNERS: [&str; 2] = ["c", "d"];

/// The connection to an agent that is online. Requests and reports are in order, and take time.
#[derive(Debug, Default)]
struct Link {
    patterns: BTreeSet<String>,
    requests: VecDeque<Effect>,
    /// Units and their values; `None` if the unit is removed.
    reports: VecDeque<(String, Option<u8>)>,
}

/// The manager's monitors, the real units, and the units that each client has.
struct World {
    all: All,
    monitors: [u32; 2],
    units: BTreeMap<Key, u8>,
    links: BTreeMap<NodeName, Link>,
    clients: BTreeMap<(u32, Key), Arc<UnitState>>,
}

fn value(value: u8) -> UnitState {
    state("active", &value.to_string())
}

impl World {
    fn new() -> Self {
        let mut all = All::default();
        let monitors = OWNERS.map(|owner| all.create(owner).unwrap());
        let (units, links, clients) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { all, monitors, units, links, clients }
    }

    fn send(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            let (Effect::SubscribeOnNode { node, .. } | Effect::UnsubscribeOnNode { node, .. }) = &effect;
            self.links.get_mut(node).expect("online").requests.push_back(effect);
        }
    }

    fn request(&mut self, node: &NodeName) -> bool {
        let Some(link) = self.links.get_mut(node) else { return false };
        match link.requests.pop_front() {
            Some(Effect::SubscribeOnNode { pattern, .. }) => {
                let glob = Glob::new(&pattern);
                let matching = self.units.iter().filter(|((of, unit), _)| of == node && glob.matches(unit));
                link.reports.extend(matching.map(|((_, unit), value)| (unit.clone(), Some(*value))));
                link.patterns.insert(pattern);
                true
            }
            Some(Effect::UnsubscribeOnNode { pattern, .. }) => {
                assert!(link.patterns.remove(&pattern), "{node} has no subscription to {pattern}");
                true
            }
            None => false,
        }
    }

    fn report(&mut self, node: &NodeName) -> bool {
        let Some(link) = self.links.get_mut(node) else { return false };
        match link.reports.pop_front() {
            Some((unit, Some(now))) => self.all.unit_properties(node, &unit, value(now)),
            Some((unit, None)) => self.all.unit_removed(node, &unit),
            None => return false,
        }
        true
    }

    /// Delivers all requests and reports.
    fn settle(&mut self) {
        for node in self.links.keys().cloned().collect::<Vec<_>>() {
            while self.request(&node) || self.report(&node) {}
        }
    }

    fn room(&mut self, owner: &'static str) -> bool {
        let Some(outgoing) = self.all.next_signals(|of| *of == owner) else { return false };
        let key = (outgoing.monitor, (outgoing.node, outgoing.systemd_unit));
        for signal in outgoing.signals {
            match signal {
                Signal::UnitPropertiesChanged(now) => {
                    self.clients.insert(key.clone(), now);
                }
                Signal::UnitRemoved(_) => {
                    assert!(self.clients.remove(&key).is_some(), "{key:?} was not sent");
                }
                Signal::UnitNew(_) | Signal::UnitStateChanged { .. } => {}
            }
        }
        true
    }

    /// The unit of a node has changed; its agent reports it if it is subscribed to.
    fn change(&mut self, node: NodeName, unit: String, now: Option<u8>) {
        let key = (node, unit);
        let before = match now {
            Some(value) => self.units.insert(key.clone(), value),
            None => self.units.remove(&key),
        };
        let Some(link) = self.links.get_mut(&key.0).filter(|_| before != now) else { return };
        if link.patterns.iter().any(|pattern| Glob::new(pattern).matches(&key.1)) {
            link.reports.push_back((key.1, now));
        }
    }

    fn handle(&mut self, event: Event) {
        let name = |n: u8| node(&format!("n{n}"));
        match event {
            Event::Subscribe { monitor, node, pattern } => {
                let at = usize::from(monitor);
                let scope = node.map_or(Scope::AllNodes, |n| Scope::Node(name(n)));
                let patterns = [PATTERNS[usize::from(pattern)].to_owned()];
                let effects = self.all.subscribe(&OWNERS[at], self.monitors[at], scope, &patterns);
                self.send(effects.unwrap().1);
            }
            Event::Unsubscribe { monitor, subscription } => {
                // A unit may be removed while its node has no subscription. The manager cannot tell
                // a report that was sent before from one that a new subscription causes, so here
                // none is on its way.
                self.settle();
                let at = usize::from(monitor);
                let id = self.monitors[at];
                let effects = self.all.unsubscribe(&OWNERS[at], id, subscription).unwrap_or_default();
                self.send(effects);
                let of = &self.all.monitors[&id];
                self.clients.retain(|(monitor, (node, unit)), _| *monitor != id || of.matches(node, unit));
                self.settle();
            }
            Event::Online(n) if self.links.contains_key(&name(n)) => {}
            Event::Online(n) => {
                self.links.insert(name(n), Link::default());
                let effects = self.all.node_online(&name(n));
                self.send(effects);
            }
            Event::Lost(n) => {
                self.links.remove(&name(n));
                self.all.node_lost(&name(n));
            }
            Event::Change { node, unit, value } => {
                self.change(name(node), format!("u{unit}"), Some(value));
            }
            Event::Removed { node, unit } => self.change(name(node), format!("u{unit}"), None),
            Event::Request(n) => drop(self.request(&name(n))),
            Event::Report(n) => drop(self.report(&name(n))),
            Event::Room(n) => drop(self.room(OWNERS[usize::from(n)])),
        }
    }
}

#[test]
fn the_patterns_of_all_clients_on_one_node_are_limited() {
    let mut all = online();
    let client = |at: usize| Box::leak(format!("c{at}").into_boxed_str()) as &'static str;
    let patterns = |at: usize, count: usize| -> Vec<String> {
        (0..count).map(|pattern| format!("{at}-{pattern}.service")).collect()
    };
    let fill = |all: &mut All, scope: &Scope, at: usize, count: usize| {
        let id = all.create(client(at)).unwrap();
        all.subscribe(&client(at), id, scope.clone(), &patterns(at, count)).map(|_| ())
    };
    let (everywhere, n1, n2) = (Scope::AllNodes, Scope::Node(node("n1")), Scope::Node(node("n2")));
    let rest = MAX_PATTERNS % MAX_SUBSCRIPTIONS;
    for at in 0..MAX_PATTERNS / MAX_SUBSCRIPTIONS {
        assert_eq!(fill(&mut all, &n1, at, MAX_SUBSCRIPTIONS), Ok(()));
    }
    assert_eq!(fill(&mut all, &everywhere, 100, rest), Ok(()));
    for scope in [&everywhere, &n1] {
        assert_eq!(fill(&mut all, scope, 101, 1), Err(Refused::TooManyPatterns));
    }
    // Other nodes have room, and patterns that are subscribed to already need none.
    assert_eq!(fill(&mut all, &n2, 101, 1), Ok(()));
    let id = all.create("other").unwrap();
    assert!(all.subscribe(&"other", id, n1.clone(), &patterns(0, 1)).is_ok());
    all.close_all(&client(100));
    assert_eq!(fill(&mut all, &n1, 102, rest), Ok(()));
    assert_eq!(fill(&mut all, &n1, 103, 1), Err(Refused::TooManyPatterns));
}

proptest! {
    /// When all requests, reports and signals have arrived, each client has the state of exactly
    /// those units that match and exist on a node that is online.
    #[test]
    fn no_final_state_is_lost(events in events()) {
        let mut world = World::new();
        for event in events {
            world.handle(event);
        }
        world.settle();
        for owner in OWNERS {
            while world.room(owner) {}
        }
        let mut expected = BTreeMap::new();
        for ((node, unit), now) in &world.units {
            for id in world.monitors {
                if world.links.contains_key(node) && world.all.monitors[&id].matches(node, unit) {
                    expected.insert((id, (node.clone(), unit.clone())), Arc::new(value(*now)));
                }
            }
        }
        prop_assert_eq!(world.clients, expected);
    }
}
