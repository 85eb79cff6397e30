//! Tests of the cache: single steps, and any order of signals and replies.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const UNIT: &str = "a.service";

fn state(active: &str) -> UnitState {
    let text = str::to_owned;
    UnitState {
        load: text("loaded"),
        active: text(active),
        sub: text("x"),
        file: String::new(),
        result: Some(text("success")),
    }
}

fn to(active: &str) -> Change {
    Change { active: Some(active.to_owned()), ..Change::default() }
}

fn emitted(active: &str) -> Vec<Step> {
    vec![Step::Emit(Event::Unit(UNIT.to_owned(), state(active)))]
}

fn reads(if_loaded: bool) -> Vec<Step> {
    vec![Step::Read { unit: UNIT.to_owned(), if_loaded }]
}

/// Returns a cache that has reported an inactive unit, read at position 1.
fn known() -> UnitCache<u32> {
    let mut cache = UnitCache::default();
    assert_eq!(cache.refresh(UNIT), reads(false));
    assert_eq!(cache.read(UNIT, 1, Some(state("inactive"))), emitted("inactive"));
    cache
}

#[test]
fn a_change_is_reported_once() {
    let mut cache = known();
    assert_eq!(cache.changed(UNIT, 2, to("active")), emitted("active"));
    assert_eq!(cache.changed(UNIT, 3, to("active")), []);
    assert_eq!(cache.changed(UNIT, 3, Change::default()), []);
}

#[test]
fn both_signals_of_a_change_are_one_event() {
    let mut cache = known();
    cache.type_changed(UNIT, Change { result: Some("exit-code".to_owned()), ..Change::default() });
    let failed = UnitState { result: Some("exit-code".to_owned()), ..state("failed") };
    let expected = vec![Step::Emit(Event::Unit(UNIT.to_owned(), failed))];
    assert_eq!(cache.changed(UNIT, 2, to("failed")), expected);
}

#[test]
fn a_signal_that_precedes_the_read_is_ignored() {
    let mut cache = known();
    assert_eq!(cache.refresh(UNIT), reads(false));
    assert_eq!(cache.read(UNIT, 9, Some(state("inactive"))), emitted("inactive"), "it was requested");
    assert_eq!(cache.changed(UNIT, 8, to("active")), []);
}

#[test]
fn a_signal_that_follows_the_read_repeats_it() {
    let mut cache = known();
    assert_eq!(cache.refresh(UNIT), reads(false));
    assert_eq!(cache.changed(UNIT, 9, to("active")), []);
    assert_eq!(cache.read(UNIT, 8, Some(state("inactive"))), reads(false));
    assert_eq!(cache.read(UNIT, 10, Some(state("active"))), emitted("active"));
}

#[test]
fn a_unit_that_is_unloaded_before_its_read_is_removed_from_the_cache() {
    let mut cache = UnitCache::default();
    let new = Step::Emit(Event::UnitNew(UNIT.to_owned()));
    assert_eq!(cache.loaded(UNIT, 1), [vec![new], reads(true)].concat());
    assert_eq!(cache.unloaded(UNIT), [Step::Emit(Event::UnitRemoved(UNIT.to_owned()))]);
    assert_eq!(cache.read(UNIT, 3, None), []);
    assert_eq!(cache.read_all(), []);
}

#[test]
fn a_requested_report_survives_the_removal_of_the_unit() {
    let mut cache = UnitCache::default();
    assert_eq!(cache.refresh(UNIT), reads(false));
    cache.unloaded(UNIT);
    assert_eq!(cache.read(UNIT, 2, Some(state("inactive"))), emitted("inactive"));
}

#[test]
fn a_known_unit_that_is_gone_after_a_new_connection_is_removed() {
    let mut cache = known();
    cache.connection_lost();
    assert_eq!(cache.read_all(), reads(true));
    assert_eq!(cache.read(UNIT, 5, None), [Step::Emit(Event::UnitRemoved(UNIT.to_owned()))]);
    assert_eq!(cache.read_all(), []);
}

#[test]
fn a_listed_unit_is_new_unless_it_is_known() {
    let mut cache = known();
    let other = "b.service".to_owned();
    let new = Step::Emit(Event::UnitNew(other.clone()));
    let read = Step::Read { unit: other.clone(), if_loaded: true };
    assert_eq!(cache.listed(&[UNIT.to_owned(), other.clone()], 4), [new, read]);
    // It is unloaded before the read.
    assert_eq!(cache.read(&other, 6, None), [Step::Emit(Event::UnitRemoved(other.clone()))]);
}

#[test]
fn a_failed_read_is_repeated() {
    let mut cache = UnitCache::default();
    assert_eq!(cache.refresh(UNIT), reads(false));
    cache.read_failed(UNIT);
    assert!(cache.has_failed());
    assert_eq!(cache.retry(), reads(false));
    assert!(!cache.has_failed());
    assert_eq!(cache.retry(), []);
    assert_eq!(cache.read(UNIT, 1, Some(state("active"))), emitted("active"), "it was requested");
    // A signal during the failed read is not lost.
    cache.read_all();
    assert_eq!(cache.changed(UNIT, 2, to("failed")), []);
    cache.read_failed(UNIT);
    assert_eq!(cache.retry(), reads(true));
    assert_eq!(cache.read(UNIT, 3, Some(state("failed"))), emitted("failed"));
}

#[test]
fn a_read_during_a_reload_is_repeated() {
    let mut cache = known();
    cache.refresh(UNIT);
    assert_eq!(cache.read_all(), []);
    assert_eq!(cache.read(UNIT, 2, Some(state("inactive"))), reads(false));
}

/// A step of a simulated systemd and of the connection to it.
#[derive(Debug, Clone, Copy)]
enum Act {
    /// The unit changes; systemd sends a signal.
    Change(u8),
    /// systemd replies to the oldest read.
    Reply,
    /// The cache handles the oldest signal.
    Signal,
    /// The cache handles the oldest reply.
    Handle,
    /// A read fails.
    Fail,
    Retry,
    Refresh,
    ReadAll,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0u8..3).prop_map(Act::Change),
        3 => Just(Act::Reply),
        3 => Just(Act::Signal),
        3 => Just(Act::Handle),
        1 => Just(Act::Fail),
        1 => Just(Act::Retry),
        1 => Just(Act::Refresh),
        1 => Just(Act::ReadAll),
    ]
}

#[derive(Default)]
struct World {
    cache: UnitCache<u32>,
    real: u8,
    position: u32,
    reads: usize,
    signals: VecDeque<(u32, u8)>,
    replies: VecDeque<(u32, u8)>,
    reported: Vec<String>,
    requested: usize,
}

impl World {
    fn act(&mut self, act: Act) {
        self.position += 1;
        let steps = match act {
            Act::Change(next) => {
                if next != self.real {
                    self.real = next;
                    self.signals.push_back((self.position, next));
                }
                Vec::new()
            }
            Act::Reply if self.reads > 0 => {
                self.reads -= 1;
                self.replies.push_back((self.position, self.real));
                Vec::new()
            }
            Act::Signal => self
                .signals
                .pop_front()
                .map_or(Vec::new(), |(at, value)| self.cache.changed(UNIT, at, to(&value.to_string()))),
            Act::Handle => self
                .replies
                .pop_front()
                .map_or(Vec::new(), |(at, value)| self.cache.read(UNIT, at, Some(state(&value.to_string())))),
            Act::Refresh => {
                self.requested += 1;
                self.cache.refresh(UNIT)
            }
            Act::ReadAll => self.cache.read_all(),
            Act::Fail if self.reads > 0 => {
                self.reads -= 1;
                self.cache.read_failed(UNIT);
                Vec::new()
            }
            Act::Retry => self.cache.retry(),
            Act::Reply | Act::Fail => Vec::new(),
        };
        for step in steps {
            match step {
                Step::Read { .. } => self.reads += 1,
                Step::Emit(Event::Unit(_, state)) => self.reported.push(state.active),
                Step::Emit(_) => {}
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.reads == 0 && !self.cache.has_failed() && self.signals.is_empty() && self.replies.is_empty()
    }
}

proptest! {
    /// The last report is the real state, and no report is repeated without a request.
    #[test]
    fn the_last_state_is_never_lost(acts in prop::collection::vec(act(), 0..80)) {
        let mut world = World::default();
        world.act(Act::Refresh);
        for act in acts {
            world.act(act);
        }
        while !world.is_idle() {
            for act in [Act::Retry, Act::Reply, Act::Signal, Act::Handle] {
                world.act(act);
            }
        }
        prop_assert_eq!(world.reported.last(), Some(&world.real.to_string()));
        let repeated = world.reported.windows(2).filter(|pair| pair[0] == pair[1]).count();
        prop_assert!(repeated <= world.requested, "{:?}", world.reported);
    }
}
