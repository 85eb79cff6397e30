//! Tests of the workflow: tables, and properties over any order of flags, failures, crashes and
//! decisions.

use super::*;
use proptest::prelude::*;

const NOT_EXPOSED: Wanted = Wanted { exposed: false, gone: false };
const FLAG: Wanted = Wanted { exposed: true, gone: false };
const GONE: Wanted = Wanted { exposed: false, gone: true };

fn badly() -> Ended {
    Ended::Badly { reason: "exit code 1".to_owned(), output: "no\n".to_owned() }
}

/// A unit that records which hooks ran; the test decides which of them fail.
#[derive(Default)]
struct Unit {
    state: State,
    ran: Vec<Hook>,
}

impl Unit {
    /// Takes steps until there is nothing to do; `fails` returns for each run whether it fails.
    fn settle(&mut self, wanted: Wanted, fails: &mut impl FnMut(Hook) -> bool) {
        for _ in 0..20 {
            match self.state.next(wanted) {
                Step::Wait => return,
                Step::Settle(state) | Step::Begin(state) => self.state = state,
                Step::Resume(run) => {
                    self.ran.push(run.hook);
                    let ended = if fails(run.hook) { badly() } else { Ended::Well };
                    self.state = self.state.ended(run, &ended);
                }
            }
        }
        panic!("it never settles: {:?}", self.state);
    }

    fn run_hooks(&mut self, wanted: Wanted) -> Vec<&'static str> {
        let before = self.ran.len();
        self.settle(wanted, &mut |_| false);
        self.ran[before..].iter().map(|hook| hook.name()).collect()
    }

    fn fails(&mut self, wanted: Wanted) -> String {
        self.settle(wanted, &mut |_| true);
        self.state.label()
    }

    fn resolved(&mut self, resolution: Resolution) {
        self.state.resolved = Some(resolution);
    }
}

#[test]
fn a_unit_without_failures_runs_each_hook_once_for_each_change() {
    let mut unit = Unit::default();
    assert_eq!(unit.state.label(), "pending");
    assert_eq!(unit.run_hooks(NOT_EXPOSED), ["install", "start"]);
    assert_eq!(unit.state.label(), "started");
    assert_eq!(unit.run_hooks(NOT_EXPOSED), [""; 0]);
    assert_eq!(unit.run_hooks(FLAG), ["exposed"]);
    assert_eq!(unit.run_hooks(FLAG), [""; 0], "once");
    assert_eq!(unit.run_hooks(NOT_EXPOSED), ["unexposed"]);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), [""; 0], "once");
    assert_eq!(unit.run_hooks(FLAG), ["exposed"]);
    assert_eq!(unit.run_hooks(GONE), ["stop"]);
    assert_eq!((unit.state.label().as_str(), unit.state.runs), ("stopped", 6));
    assert_eq!(unit.run_hooks(GONE), [""; 0]);
}

#[test]
fn a_hook_that_could_not_be_started_counts_as_not_run() {
    let mut unit = Unit::default();
    let full = "no room";
    unit.state = unit.state.not_begun(Hook::Install, full);
    assert_eq!(unit.state.label(), "install-error");
    assert_eq!(
        unit.state.failure.as_ref().map(|failure| failure.reason.as_str()),
        Some("not started: no room")
    );
    assert_eq!(unit.run_hooks(FLAG), [""; 0], "not before somebody says so");
    unit.resolved(Resolution::Retry);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), ["install", "start"]);
    // The flag is cleared before the operator decides: `exposed` never ran, so `unexposed` is not
    // due.
    unit.state = unit.state.not_begun(Hook::Exposed, full);
    unit.resolved(Resolution::Retry);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), [""; 0]);
    unit.state = unit.state.not_begun(Hook::Exposed, full);
    unit.resolved(Resolution::Retry);
    assert_eq!(unit.run_hooks(FLAG), ["exposed"]);
    unit.state = unit.state.not_begun(Hook::Unexposed, full);
    unit.resolved(Resolution::Retry);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), ["unexposed"]);
    // A skipped hook does not count as run: the other hook of the pair does not follow it.
    unit.state = unit.state.not_begun(Hook::Exposed, full);
    unit.resolved(Resolution::Skip);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), [""; 0]);
    unit.state = unit.state.not_begun(Hook::Exposed, full);
    unit.resolved(Resolution::Skip);
    assert_eq!(unit.run_hooks(FLAG), [""; 0], "gone on without it");
    unit.state = unit.state.not_begun(Hook::Unexposed, full);
    unit.resolved(Resolution::Skip);
    assert_eq!(unit.run_hooks(FLAG), [""; 0]);
}

/// A hook that was ordered but could not be started, for example because it is not executable.
#[test]
fn no_unexposed_hook_runs_without_an_exposed_hook() {
    let mut unit = Unit::default();
    unit.run_hooks(NOT_EXPOSED);
    let not_run = |unit: &mut Unit, wanted| {
        let Step::Begin(begun) = unit.state.next(wanted) else { panic!("a hook is due") };
        unit.state = begun.ended(begun.running.unwrap(), &Ended::NotBegun { reason: "no".to_owned() });
        unit.state.label()
    };
    for resolution in [Resolution::Skip, Resolution::Retry] {
        assert_eq!(not_run(&mut unit, FLAG), "exposed-error");
        unit.resolved(resolution);
        assert_eq!(unit.run_hooks(NOT_EXPOSED), [""; 0], "{resolution:?}");
    }
    assert_eq!(unit.run_hooks(FLAG), ["exposed"]);
    assert_eq!(not_run(&mut unit, NOT_EXPOSED), "unexposed-error");
    unit.resolved(Resolution::Retry);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), ["unexposed"]);
}

#[test]
fn a_service_exposed_during_install_causes_one_hook_after_start() {
    let mut unit = Unit::default();
    assert_eq!(unit.run_hooks(FLAG), ["install", "start", "exposed"]);
    assert_eq!(unit.run_hooks(FLAG), [""; 0]);
}

#[test]
fn expose_and_unexpose_run_both_hooks_or_none() {
    let mut unit = Unit::default();
    unit.run_hooks(NOT_EXPOSED);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), [""; 0], "gone before anybody looked");
    // The flag is cleared while `exposed` runs.
    let Step::Begin(begun) = unit.state.next(FLAG) else { panic!("exposed is due") };
    let run = begun.running.unwrap();
    unit.state = begun.ended(run, &Ended::Well);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), ["unexposed"]);
}

#[test]
fn failures_wait_for_the_operator() {
    let mut unit = Unit::default();
    assert_eq!(unit.fails(NOT_EXPOSED), "install-error");
    assert_eq!(unit.run_hooks(FLAG), [""; 0], "nothing runs on an error");
    unit.resolved(Resolution::Retry);
    assert_eq!(unit.fails(NOT_EXPOSED), "install-error");
    unit.resolved(Resolution::Retry);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), ["install", "start"]);

    let mut unit = Unit::default();
    unit.fails(NOT_EXPOSED);
    unit.resolved(Resolution::Skip);
    assert_eq!(unit.fails(NOT_EXPOSED), "start-error");
    let failure = unit.state.failure.clone().unwrap();
    assert_eq!(
        (failure.hook, failure.reason.as_str(), failure.output.as_str()),
        (Hook::Start, "exit code 1", "no\n")
    );
    unit.resolved(Resolution::Skip);
    assert_eq!(unit.run_hooks(NOT_EXPOSED), [""; 0]);
    assert_eq!(unit.state.label(), "started");
    assert_eq!(unit.fails(GONE), "stop-error");
    unit.resolved(Resolution::Skip);
    unit.run_hooks(GONE);
    assert_eq!(unit.state.label(), "stopped");
}

#[test]
fn a_failed_exposed_hook_counts_as_run() {
    for (resolution, flag, then) in [
        (Resolution::Retry, FLAG, vec!["exposed"]),
        (Resolution::Retry, NOT_EXPOSED, vec!["unexposed"]),
        (Resolution::Skip, FLAG, vec![]),
        (Resolution::Skip, NOT_EXPOSED, vec!["unexposed"]),
    ] {
        let mut unit = Unit::default();
        unit.run_hooks(NOT_EXPOSED);
        assert_eq!(unit.fails(FLAG), "exposed-error");
        unit.resolved(resolution);
        assert_eq!(unit.run_hooks(flag), then, "{resolution:?} {flag:?}");
    }
    for (resolution, flag, then) in [
        (Resolution::Retry, NOT_EXPOSED, vec!["unexposed"]),
        (Resolution::Retry, FLAG, vec!["exposed"]),
        (Resolution::Skip, NOT_EXPOSED, vec![]),
        (Resolution::Skip, FLAG, vec!["exposed"]),
    ] {
        let mut unit = Unit::default();
        unit.run_hooks(FLAG);
        assert_eq!(unit.fails(NOT_EXPOSED), "unexposed-error");
        unit.resolved(resolution);
        assert_eq!(unit.run_hooks(flag), then, "{resolution:?} {flag:?}");
    }
}

#[test]
fn a_removed_unit_stops_if_it_was_started() {
    let mut unit = Unit::default();
    assert_eq!(unit.run_hooks(GONE), [""; 0]);
    unit.fails(NOT_EXPOSED);
    assert_eq!(unit.run_hooks(GONE), [""; 0], "an install that failed needs no stop");
    let mut unit = Unit::default();
    unit.run_hooks(NOT_EXPOSED);
    unit.fails(FLAG);
    assert_eq!(unit.run_hooks(GONE), ["stop"], "whatever else had failed");
}

#[test]
fn a_resolution_without_an_error_is_dropped() {
    let mut unit = Unit::default();
    unit.run_hooks(NOT_EXPOSED);
    unit.resolved(Resolution::Skip);
    assert_eq!(unit.run_hooks(FLAG), ["exposed"]);
    assert_eq!(unit.state.resolved, None);
}

#[test]
fn the_result_of_another_run_is_ignored() {
    let unit = State::default();
    let Step::Begin(begun) = unit.next(NOT_EXPOSED) else { panic!("install is due") };
    let stale = Run { hook: Hook::Install, number: 7 };
    assert_eq!(begun.ended(stale, &Ended::Well), begun);
    assert_eq!(unit.ended(stale, &badly()), unit);
}

#[test]
fn an_invalid_state_is_not_a_new_unit() {
    let good = Unit::default().state.to_bytes();
    assert_eq!(State::parse(&good), Ok(State::default()));
    for (garbage, problem) in [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "\"phase\" is not a text"),
        (r#"{"phase":"dead"}"#, "no such phase"),
        (r#"{"phase":"pending"}"#, "\"exposed\" is not true or false"),
        (r#"{"phase":"pending","exposed":false,"runs":-1}"#, "\"runs\" is not a number"),
        (
            r#"{"phase":"pending","exposed":false,"runs":1,"running":{}}"#,
            "\"running\": \"hook\" is not a text",
        ),
        (
            r#"{"phase":"pending","exposed":false,"runs":1,"running":{"hook":"x","run":1}}"#,
            "\"running\": no such hook",
        ),
        (r#"{"phase":"pending","exposed":false,"runs":1,"resolved":1}"#, "neither retry nor skip"),
        (r#"{"phase":"pending","exposed":false,"runs":1,"error":"x"}"#, "\"error\" is not an object"),
    ] {
        let refused = State::parse(garbage.as_bytes()).expect_err("refused");
        assert!(refused.contains(problem), "{garbage}: {refused}");
    }
    assert!(State::parse(&vec![b' '; MAX_STATE_BYTES + 1]).is_err());
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Flag(bool),
    /// One step; `fails` is the result of a run in it.
    Step {
        fails: bool,
    },
    /// The agent is killed: only the written state remains.
    Crash,
    Resolve(Resolution),
    Remove,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => any::<bool>().prop_map(Event::Flag),
        10 => proptest::bool::weighted(0.2).prop_map(|fails| Event::Step { fails }),
        3 => Just(Event::Crash),
        2 => prop_oneof![Just(Resolution::Retry), Just(Resolution::Skip)].prop_map(Event::Resolve),
        1 => Just(Event::Remove),
    ];
    proptest::collection::vec(event, 0..60)
}

proptest! {
    /// For any events: hooks run in their order, the pair alternates, and each run has a number of
    /// its own.
    #[test]
    fn the_contract_holds_for_any_order_of_events(events in events()) {
        let (mut state, mut wanted) = (State::default(), NOT_EXPOSED);
        // The runs that succeeded, and all runs with their numbers.
        let (mut passed, mut begun): (Vec<Hook>, Vec<(Hook, u64)>) = (Vec::new(), Vec::new());
        for event in events {
            match event {
                Event::Flag(set) => wanted.exposed = set,
                Event::Remove => wanted.gone = true,
                Event::Resolve(resolution) => state.resolved = Some(resolution),
                Event::Crash => state = State::parse(&state.to_bytes()).expect("what was written"),
                Event::Step { fails } => match state.next(wanted) {
                    Step::Wait => {}
                    Step::Settle(next) => {
                        prop_assert_ne!(&next, &state);
                        state = next;
                    }
                    Step::Begin(next) => {
                        let run = next.running.expect("a run");
                        begun.push((run.hook, run.number));
                        state = next;
                    }
                    Step::Resume(run) => {
                        prop_assert_eq!(begun.last().copied(), Some((run.hook, run.number)));
                        state = state.ended(run, &if fails { badly() } else { Ended::Well });
                        if !fails {
                            passed.push(run.hook);
                        }
                    }
                },
            }
            prop_assert_eq!(State::parse(&state.to_bytes()), Ok(state.clone()));
        }
        prop_assert!(begun.windows(2).all(|pair| pair[0].1 < pair[1].1));
        for once in [Hook::Install, Hook::Start, Hook::Stop] {
            prop_assert!(passed.iter().filter(|hook| **hook == once).count() <= 1);
        }
        let is_flag = |hook: &Hook| matches!(hook, Hook::Exposed | Hook::Unexposed);
        let pair: Vec<Hook> = begun.iter().map(|run| run.0).filter(is_flag).collect();
        prop_assert_ne!(pair.first(), Some(&Hook::Unexposed), "unexposed only after exposed");
        let started = begun.iter().position(|run| run.0 == Hook::Exposed);
        let start = begun.iter().position(|run| run.0 == Hook::Start);
        prop_assert!(started.is_none() || start < started || start.is_none(), "exposed only once started");
    }

    /// Without failures the pair alternates strictly, and the final state matches the flag.
    #[test]
    fn exposed_and_unexposed_hooks_alternate(
        flags in proptest::collection::vec(any::<bool>(), 0..30),
        looks in any::<u32>(),
    ) {
        let (mut unit, mut flag) = (Unit::default(), false);
        for (at, set) in flags.into_iter().enumerate() {
            flag = set;
            // Some changes are made and undone before the unit takes a step.
            if looks >> (at % 32) & 1 == 1 {
                unit.settle(Wanted { exposed: flag, gone: false }, &mut |_| false);
            }
        }
        unit.settle(Wanted { exposed: flag, gone: false }, &mut |_| false);
        let pair: Vec<Hook> =
            unit.ran.iter().copied().filter(|hook| matches!(hook, Hook::Exposed | Hook::Unexposed)).collect();
        for (at, hook) in pair.iter().enumerate() {
            prop_assert_eq!(*hook, if at % 2 == 0 { Hook::Exposed } else { Hook::Unexposed });
        }
        prop_assert_eq!(pair.len() % 2 == 1, flag);
        prop_assert_eq!(unit.state.exposed, flag);
    }
}

#[test]
fn a_unit_that_never_started_runs_no_stop_hook() {
    for phase in [Phase::Pending, Phase::Installed, Phase::Stopped] {
        let state = State { phase, ..State::default() };
        assert_eq!(state.next(Wanted { exposed: true, gone: true }), Step::Wait, "{phase:?}");
    }
    let started = State { phase: Phase::Started, ..State::default() };
    let step = started.next(Wanted { exposed: true, gone: true });
    assert!(
        matches!(step, Step::Begin(State { running: Some(Run { hook: Hook::Stop, .. }), .. })),
        "{step:?}"
    );
}
