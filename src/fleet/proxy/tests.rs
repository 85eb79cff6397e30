//! Tables of single decisions; `world` has the property over all orders of events.

use super::*;

#[path = "world.rs"]
mod world;

type Core = Proxies<Duration>;

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn target(name: &str) -> NodeUnit {
    (node(name), "db.service".to_owned())
}

fn proxy(source: &str) -> ProxyKey {
    (node(source), "hirte-proxy@bar_db.service".to_owned())
}

fn units(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// A manager of foo, baz and bar, on which all may depend. All nodes are connected; bar's systemd
/// has the number 7.
fn connected() -> Core {
    let mut core = Core::new(GRACE);
    let bar = BTreeSet::from([node("bar")]);
    let rules = [("foo", bar.clone()), ("baz", bar), ("bar", BTreeSet::from([node("foo")]))];
    core.set_rules(rules.map(|(name, allowed)| (node(name), Some(allowed))).into(), at(0));
    for name in ["foo", "baz", "bar"] {
        core.node_online(&node(name), at(0));
        assert_eq!(core.announced(&node(name), 7, &[], at(0)), []);
    }
    core
}

fn report(core: &mut Core, unit: &str, state: &str, now: u64) -> Vec<Effect> {
    core.unit_state(&node("bar"), unit, Activity::of(state), at(now))
}

fn done(core: &mut Core, now: u64) -> Vec<Effect> {
    core.job_ended(&node("bar"), "hirte-dep@db.service", &Ok(()), at(now))
}

/// Starts a proxy of foo, whose target becomes active.
fn active() -> Core {
    let mut core = connected();
    let start = core.requested(proxy("foo"), target("bar"), units(&[]), at(0));
    assert_eq!(start, [Effect::Watch { target: target("bar") }, Effect::StartDep { target: target("bar") }]);
    for unit in ["db.service", "hirte-dep@db.service"] {
        assert_eq!(report(&mut core, unit, "active", 1), []);
    }
    assert_eq!(done(&mut core, 2), [Effect::Ready { proxy: proxy("foo"), result: Ok(7) }]);
    core
}

fn refused(effects: &[Effect]) -> &str {
    match effects {
        [Effect::Ready { result: Err(reason), .. }] => reason,
        other => panic!("not refused: {other:?}"),
    }
}

fn stopped(effects: &[Effect]) -> Vec<&ProxyKey> {
    let ended = effects.iter().filter_map(|effect| match effect {
        Effect::TargetStopped { proxy, .. } => Some(proxy),
        _ => None,
    });
    ended.collect()
}

#[test]
fn the_last_proxy_of_all_sources_stops_the_dep() {
    let mut core = active();
    let second = core.requested(proxy("baz"), target("bar"), units(&[]), at(3));
    assert_eq!(
        second,
        [Effect::StartDep { target: target("bar") }],
        "a start of an active unit ends at once"
    );
    assert_eq!(done(&mut core, 4), [Effect::Ready { proxy: proxy("baz"), result: Ok(7) }]);
    assert_eq!(core.removed(&proxy("foo"), at(5)), []);
    assert_eq!(core.removed(&proxy("baz"), at(6)), [Effect::StopDep { target: target("bar") }]);
    assert_eq!(done(&mut core, 7), [Effect::Unwatch { target: target("bar") }]);
    assert_eq!((core.deadline(), core.list()), (None, vec![]));
}

#[test]
fn a_stopped_target_ends_its_proxies_after_a_second_report() {
    let mut core = active();
    assert_eq!(report(&mut core, "hirte-dep@db.service", "inactive", 10), []);
    assert_eq!(report(&mut core, "db.service", "failed", 10), []);
    assert_eq!(core.tick(at(309)), []);
    assert_eq!(core.deadline(), Some(at(310)));
    assert_eq!(core.tick(at(310)), [Effect::Refresh { target: target("bar") }]);
    assert_eq!(report(&mut core, "hirte-dep@db.service", "inactive", 311), []);
    let ended = report(&mut core, "db.service", "failed", 311);
    assert_eq!(stopped(&ended), [&proxy("foo")]);
    let listed = core.list().remove(0);
    assert_eq!(
        (listed.state, listed.reason.as_str()),
        (ListedState::Stopped, "db.service on node bar stopped")
    );
    assert_eq!(core.deadline(), None);
}

#[test]
fn a_restart_of_the_target_changes_nothing() {
    let mut core = active();
    for (unit, state) in [
        ("db.service", "deactivating"),
        ("hirte-dep@db.service", "inactive"),
        ("db.service", "inactive"),
        ("db.service", "activating"),
        ("db.service", "active"),
    ] {
        assert_eq!(report(&mut core, unit, state, 10), [], "{unit} {state}");
    }
    // The dep service has not come back by itself.
    assert_eq!(core.tick(at(310)), [Effect::Refresh { target: target("bar") }]);
    assert_eq!(report(&mut core, "db.service", "active", 311), []);
    let start = report(&mut core, "hirte-dep@db.service", "inactive", 311);
    assert_eq!(start, [Effect::StartDep { target: target("bar") }]);
    assert_eq!(done(&mut core, 312), []);
    report(&mut core, "hirte-dep@db.service", "active", 312);
    assert_eq!(core.tick(at(60_000)), []);
}

#[test]
fn a_lost_source_counts_until_the_grace_is_over() {
    let mut core = active();
    assert_eq!(core.node_lost(&node("foo"), at(1_000)), []);
    assert_eq!((core.tick(at(30_999)), core.deadline()), (vec![], Some(at(31_000))));
    assert_eq!(core.tick(at(31_000)), [Effect::StopDep { target: target("bar") }]);
    // The target had StopWhenUnneeded=. The source returns, and its proxy is active.
    report(&mut core, "hirte-dep@db.service", "inactive", 31_001);
    done(&mut core, 31_002);
    core.node_online(&node("foo"), at(40_000));
    let again = core.established(proxy("foo"), target("bar"), 7, at(40_000));
    assert_eq!(again, [Effect::Watch { target: target("bar") }]);
    let start = report(&mut core, "db.service", "inactive", 40_001);
    assert_eq!(start, [Effect::StartDep { target: target("bar") }], "it is started again");
    // A source that returns in time changes nothing.
    let mut core = active();
    core.node_lost(&node("foo"), at(1_000));
    core.node_online(&node("foo"), at(30_000));
    assert_eq!(core.established(proxy("foo"), target("bar"), 7, at(30_000)), []);
    assert_eq!(core.announced(&node("foo"), 7, &[], at(30_000)), []);
    assert_eq!((core.tick(at(90_000)), core.deadline()), (vec![], None));
    // A proxy that it does not announce has ended meanwhile.
    core.node_lost(&node("foo"), at(91_000));
    core.node_online(&node("foo"), at(92_000));
    let effects = core.announced(&node("foo"), 7, &[], at(92_000));
    assert_eq!(effects, [Effect::StopDep { target: target("bar") }]);
}

#[test]
fn a_lost_answer_is_repeated() {
    let mut core = active();
    core.node_lost(&node("foo"), at(3));
    core.node_online(&node("foo"), at(4));
    // The agent did not get the answer, so its proxy still waits. The dep is not stopped meanwhile.
    let effects = core.requested(proxy("foo"), target("bar"), units(&[]), at(4));
    assert_eq!(effects, [Effect::StartDep { target: target("bar") }]);
    assert_eq!(done(&mut core, 5), [Effect::Ready { proxy: proxy("foo"), result: Ok(7) }]);
}

#[test]
fn a_target_node_that_returns_keeps_or_starts_its_deps() {
    for (instance, unit, expected) in [
        (7, "active", vec![]),
        (8, "inactive", vec![Effect::StartDep { target: target("bar") }]),
        (7, "inactive", vec![]),
    ] {
        let mut core = active();
        assert_eq!(core.node_lost(&node("bar"), at(1_000)), [], "a lost target ends nothing");
        assert_eq!(core.tick(at(500_000)), []);
        core.node_online(&node("bar"), at(500_000));
        assert_eq!(core.announced(&node("bar"), instance, &[], at(500_000)), []);
        let dep = if unit == "active" { "active" } else { "inactive" };
        let mut effects = report(&mut core, "hirte-dep@db.service", dep, 500_001);
        effects.extend(report(&mut core, "db.service", unit, 500_001));
        assert_eq!(effects, expected, "{instance} {unit}");
        if instance == 8 {
            let notified = Effect::Ready { proxy: proxy("foo"), result: Ok(8) };
            assert_eq!(done(&mut core, 500_002), [notified], "a later stop is one on the new instance");
        } else if unit == "inactive" {
            core.tick(at(501_000));
            report(&mut core, "hirte-dep@db.service", "inactive", 501_000);
            let ended = report(&mut core, "db.service", "inactive", 501_000);
            assert_eq!(stopped(&ended), [&proxy("foo")], "stopped while its node was lost");
        }
    }
}

#[test]
fn a_new_manager_waits_for_the_sources_of_running_deps() {
    let mut core = connected();
    core.node_lost(&node("bar"), at(5));
    core.node_online(&node("bar"), at(10));
    let deps = ["hirte-dep@db.service".to_owned(), "other.service".to_owned()];
    assert_eq!(core.announced(&node("bar"), 7, &deps, at(10)), [Effect::Watch { target: target("bar") }]);
    report(&mut core, "hirte-dep@db.service", "active", 11);
    assert_eq!(core.tick(at(30_009)), []);
    let mut later = core.established(proxy("foo"), target("bar"), 7, at(20_000));
    later.extend(core.tick(at(30_010)));
    assert_eq!(later, [], "its source came in time");
    assert_eq!(core.removed(&proxy("foo"), at(40_000)), [Effect::StopDep { target: target("bar") }]);
}

#[test]
fn refusals_have_a_reason() {
    let mut core = connected();
    let denied = core.requested(proxy("foo"), target("baz"), units(&[]), at(1));
    assert!(refused(&denied).contains("juju node allow foo --on baz"), "{denied:?}");
    let unknown = core.requested(proxy("foo"), target("nowhere"), units(&[]), at(1));
    assert_eq!(refused(&unknown), "the manager has no node 'nowhere'");
    assert_eq!(core.list().len(), 1, "the newest failure of a proxy");
    let own = core.requested(proxy("foo"), target("foo"), units(&[]), at(1));
    assert!(own.contains(&Effect::StartDep { target: target("foo") }), "a node may depend on itself");
    // A failed start has the reason of systemd.
    core.requested(proxy("baz"), target("bar"), units(&[]), at(2));
    let bar = node("bar");
    let failed =
        core.job_ended(&bar, "hirte-dep@db.service", &Err("Unit db.service not found.".to_owned()), at(3));
    let Effect::Ready { result: Err(reason), .. } = &failed[0] else { panic!("{failed:?}") };
    assert_eq!(reason, "db.service on node bar did not start: Unit db.service not found.");
}

#[test]
fn a_proxy_waits_for_a_target_node_for_a_bounded_time() {
    let mut core = connected();
    core.node_lost(&node("bar"), at(0));
    assert_eq!(
        core.requested(proxy("foo"), target("bar"), units(&[]), at(5)),
        [Effect::Watch { target: target("bar") }]
    );
    assert_eq!(core.deadline(), Some(at(10_005)));
    let effects = core.tick(at(10_005));
    assert_eq!(
        effects[0],
        Effect::Ready { proxy: proxy("foo"), result: Err("node 'bar' is offline".to_owned()) }
    );
    assert_eq!(core.deadline(), None);
    // A node that returns in time starts the target.
    core.requested(proxy("foo"), target("bar"), units(&[]), at(20_000));
    core.node_online(&node("bar"), at(21_000));
    let start = core.announced(&node("bar"), 8, &[], at(21_000));
    assert_eq!(start, [Effect::StartDep { target: target("bar") }]);
}

#[test]
fn withdrawn_permission_ends_proxies() {
    let mut core = active();
    let all = ["foo", "bar", "baz"];
    let unknown = all.map(|name| (node(name), None));
    assert_eq!(core.set_rules(unknown.into(), at(8)), [], "nothing ends while the permissions are unknown");
    let refused_now = core.requested(proxy("baz"), target("bar"), units(&[]), at(8));
    assert_eq!(refused(&refused_now), "the permissions of node 'baz' cannot be read");
    let rules = all.map(|name| (node(name), Some(BTreeSet::new())));
    let effects = core.set_rules(rules.into(), at(9));
    assert_eq!(stopped(&effects), [&proxy("foo")]);
    assert_eq!(effects[1], Effect::StopDep { target: target("bar") });
}

#[test]
fn cycles_are_refused_with_their_path() {
    let mut core = connected();
    core.requested(proxy("foo"), (node("bar"), "b.service".to_owned()), units(&["a.service"]), at(1));
    let name = "hirte-proxy@foo_a.service".to_owned();
    let own = (node("foo"), "a.service".to_owned());
    let closing = core.requested((node("bar"), name.clone()), own.clone(), units(&["b.service"]), at(2));
    let path = "bar/b.service -> foo/a.service -> bar/b.service";
    assert_eq!(refused(&closing), format!("the units wait for each other: {path}"));
    // Without an order between the units, nothing waits.
    let mut core = connected();
    core.requested(proxy("foo"), (node("bar"), "b.service".to_owned()), units(&[]), at(1));
    let other = core.requested((node("bar"), name), own, units(&["b.service"]), at(2));
    assert!(other.contains(&Effect::StartDep { target: (node("foo"), "a.service".to_owned()) }));
}

#[test]
fn a_dep_that_is_stopped_by_hand_is_started_again() {
    let mut core = active();
    let start = [Effect::StartDep { target: target("bar") }];
    for now in [1_000, 20_000] {
        assert_eq!(report(&mut core, "hirte-dep@db.service", "inactive", now), []);
        assert_eq!(core.tick(at(now + 300)), [Effect::Refresh { target: target("bar") }]);
        assert_eq!(report(&mut core, "db.service", "active", now + 301), []);
        assert_eq!(report(&mut core, "hirte-dep@db.service", "inactive", now + 301), start);
        done(&mut core, now + 302);
        report(&mut core, "hirte-dep@db.service", "active", now + 302);
        // Not again without a pause.
        assert_eq!(report(&mut core, "hirte-dep@db.service", "inactive", now + 303), []);
        assert_eq!(core.deadline(), Some(at(now + 5_301)));
        report(&mut core, "hirte-dep@db.service", "active", now + 304);
        assert_eq!((core.tick(at(now + 5_301)), core.deadline()), (vec![], None));
    }
}

#[test]
fn proxies_of_one_source_are_limited() {
    let mut core = connected();
    for number in 0..MAX_PROXIES {
        core.requested((node("foo"), number.to_string()), target("bar"), units(&[]), at(1));
    }
    let excess = core.requested((node("foo"), "more".to_owned()), target("bar"), units(&[]), at(1));
    assert!(refused(&excess).contains("1000 proxies"), "{excess:?}");
    let again = core.requested((node("foo"), "0".to_owned()), target("bar"), units(&[]), at(1));
    assert_eq!(again, [], "known");
}
