//! Tests of the job queue.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

type Queue = Jobs<(), Duration>;

const T: Duration = Duration::ZERO;

fn request(node: &str, unit: &str, mode: JobMode) -> Request<()> {
    let node = node.parse().unwrap();
    Request { node, systemd_unit: unit.to_owned(), kind: JobType::Start, mode, payload: () }
}

fn submit(queue: &mut Queue, mode: JobMode) -> Result<(u32, Vec<String>), Refused> {
    queue.submit(request("n1", "a.service", mode), T).map(|(id, effects)| (id, shown(&effects)))
}

fn n1() -> NodeName {
    "n1".parse().unwrap()
}

/// A queue in which the node accepts each job that it is sent.
fn accept(queue: &mut Queue, id: u32) {
    assert_eq!(queue.accepted(id, T), vec![]);
}

/// One short line for each effect.
fn shown(effects: &[Effect<()>]) -> Vec<String> {
    let show = |effect: &Effect<()>| match effect {
        Effect::JobNew { id, .. } => format!("new {id}"),
        Effect::StartOnNode { id, request } => format!("start {id} {}", request.mode),
        Effect::CancelOnNode { id, .. } => format!("cancel {id}"),
        Effect::StateChanged { id, state } => format!("{state} {id}"),
        Effect::JobRemoved { removed, .. } => format!("{} {}", removed.result, removed.id),
    };
    effects.iter().map(show).collect()
}

#[test]
fn the_second_job_waits_for_the_first() {
    let mut queue = Queue::default();
    assert_eq!(submit(&mut queue, JobMode::Replace).unwrap().1, ["new 1", "running 1", "start 1 replace"]);
    assert_eq!(submit(&mut queue, JobMode::Fail).unwrap().1, ["new 2"]);
    assert_eq!(queue.get(2).unwrap().state, JobState::Waiting);
    accept(&mut queue, 1);
    let ended = queue.done(&n1(), 1, JobResult::Timeout, T);
    assert_eq!(shown(&ended), ["timeout 1", "running 2", "start 2 fail"]);
    accept(&mut queue, 2);
    assert_eq!(shown(&queue.done(&n1(), 2, JobResult::Done, T)), ["done 2"]);
    assert!(queue.is_empty() && queue.slots.is_empty());
}

#[test]
fn replace_cancels_the_queued_job_and_fail_refuses() {
    let mut queue = Queue::default();
    submit(&mut queue, JobMode::Fail).unwrap();
    submit(&mut queue, JobMode::Fail).unwrap();
    assert_eq!(submit(&mut queue, JobMode::Fail), Err(Refused::Queued));
    assert_eq!(
        submit(&mut queue, JobMode::Replace).unwrap(),
        (3, vec!["cancelled 2".into(), "new 3".into()])
    );
    assert_eq!(queue.ids().collect::<Vec<_>>(), [1, 3]);
}

#[test]
fn queued_jobs_are_cancelled_at_once_and_running_jobs_on_their_node() {
    let mut queue = Queue::default();
    submit(&mut queue, JobMode::Replace).unwrap();
    submit(&mut queue, JobMode::Replace).unwrap();
    assert_eq!(shown(&queue.cancel(2, T).unwrap()), ["cancelled 2"]);
    assert_eq!(queue.cancel(2, T), None);
    accept(&mut queue, 1);
    assert_eq!(shown(&queue.cancel(1, T).unwrap()), ["cancel 1"]);
    assert_eq!(shown(&queue.cancel(1, T).unwrap()), ["cancel 1"], "the first request may have failed");
    assert_eq!(shown(&queue.done(&n1(), 1, JobResult::Cancelled, T)), ["cancelled 1"]);
}

#[test]
fn a_result_or_a_cancellation_before_the_answer_waits_for_it() {
    let mut queue = Queue::default();
    submit(&mut queue, JobMode::Replace).unwrap();
    assert_eq!(queue.done(&n1(), 1, JobResult::Done, T), vec![]);
    assert_eq!(queue.done(&n1(), 1, JobResult::Failed, T), vec![], "the first result counts");
    assert_eq!(shown(&queue.accepted(1, T)), ["done 1"]);
    submit(&mut queue, JobMode::Replace).unwrap();
    assert_eq!(queue.cancel(2, T), Some(vec![]));
    assert_eq!(shown(&queue.accepted(2, T)), ["cancel 2"]);
}

#[test]
fn a_refusal_after_the_result_keeps_the_result() {
    let mut queue = Queue::default();
    submit(&mut queue, JobMode::Replace).unwrap();
    queue.done(&n1(), 1, JobResult::Done, T);
    assert_eq!(shown(&queue.refused(1, T)), ["done 1"]);
    submit(&mut queue, JobMode::Replace).unwrap();
    queue.done(&n1(), 2, JobResult::Skipped, T);
    assert_eq!(shown(&queue.unanswered(2, T)), ["skipped 2"]);
}

#[test]
fn a_job_without_an_answer_is_cancelled_on_its_node() {
    let mut queue = Queue::default();
    submit(&mut queue, JobMode::Replace).unwrap();
    submit(&mut queue, JobMode::Replace).unwrap();
    let ended = shown(&queue.unanswered(1, T));
    assert_eq!(ended, ["cancel 1", "failed 1", "running 2", "start 2 replace"]);
    assert_eq!(queue.unanswered(1, T), vec![]);
}

#[test]
fn a_lost_node_ends_its_jobs_only() {
    let mut queue = Queue::default();
    submit(&mut queue, JobMode::Replace).unwrap();
    submit(&mut queue, JobMode::Replace).unwrap();
    queue.submit(request("n2", "a.service", JobMode::Replace), T).unwrap();
    assert_eq!(shown(&queue.node_lost(&n1(), T)), ["cancelled 2", "failed 1"]);
    assert_eq!(shown(&queue.done(&n1(), 1, JobResult::Done, T)), Vec::<String>::new());
    assert_eq!(queue.ids().collect::<Vec<_>>(), [3]);
    assert_eq!(shown(&queue.stop(T)), ["cancelled 3"]);
}

#[test]
fn reports_of_other_nodes_and_of_waiting_jobs_are_ignored() {
    let mut queue = Queue::default();
    submit(&mut queue, JobMode::Replace).unwrap();
    submit(&mut queue, JobMode::Replace).unwrap();
    let n2 = "n2".parse().unwrap();
    assert_eq!(queue.done(&n2, 1, JobResult::Done, T), vec![]);
    assert_eq!(queue.done(&n1(), 2, JobResult::Done, T), vec![]);
    assert_eq!(queue.state_changed(&n1(), 2, JobState::Running), vec![]);
    assert_eq!(shown(&queue.state_changed(&n1(), 1, JobState::Waiting)), ["waiting 1"]);
    assert_eq!(shown(&queue.refused(1, T)), ["failed 1", "running 2", "start 2 replace"]);
}

#[test]
fn ids_are_never_zero_and_never_in_use() {
    let mut queue = Queue { last_id: u32::MAX - 1, ..Queue::default() };
    assert_eq!(submit(&mut queue, JobMode::Replace).unwrap().0, u32::MAX);
    assert_eq!(submit(&mut queue, JobMode::Replace).unwrap().0, 1);
    queue.last_id = u32::MAX - 1;
    let (id, _) = queue.submit(request("n2", "b.service", JobMode::Replace), T).unwrap();
    assert_eq!(id, 2);
}

#[test]
fn too_many_jobs_are_refused() {
    let mut queue = Queue::default();
    for at in 0..MAX_JOBS {
        queue.submit(request("n1", &format!("{at}.service"), JobMode::Replace), T).unwrap();
    }
    let more = queue.submit(request("n1", "more.service", JobMode::Replace), T);
    assert_eq!(more, Err(Refused::Full));
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Submit { node: u8, unit: u8, mode: JobMode },
    Cancel(u32),
    Accepted(u32),
    Refused(u32),
    Unanswered(u32),
    Done { node: u8, id: u32, result: JobResult },
    State { node: u8, id: u32, state: JobState },
    Lost(u8),
    Stop,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let id = || 1..30_u32;
    let node = || 0..3_u8;
    let mode = prop::sample::select(JobMode::ALL);
    let event = prop_oneof![
        8 => (node(), 0..3_u8, mode).prop_map(|(node, unit, mode)| Event::Submit { node, unit, mode }),
        3 => id().prop_map(Event::Cancel),
        6 => id().prop_map(Event::Accepted),
        2 => id().prop_map(Event::Refused),
        1 => id().prop_map(Event::Unanswered),
        6 => (node(), id(), prop::sample::select(JobResult::ALL))
            .prop_map(|(node, id, result)| Event::Done { node, id, result }),
        2 => (node(), id(), prop::sample::select(JobState::ALL))
            .prop_map(|(node, id, state)| Event::State { node, id, state }),
        1 => node().prop_map(Event::Lost),
        1 => Just(Event::Stop),
    ];
    prop::collection::vec(event, 0..80)
}

/// The signals that an observer has received.
#[derive(Debug, Default)]
struct Seen {
    new: BTreeSet<u32>,
    sent: BTreeSet<u32>,
    removed: BTreeSet<u32>,
    /// The running job of each unit.
    running: BTreeMap<(NodeName, String), u32>,
}

impl Seen {
    fn observe(&mut self, effects: Vec<Effect<()>>) {
        for effect in effects {
            match effect {
                Effect::JobNew { id, .. } => assert!(self.new.insert(id), "two JobNew of {id}"),
                Effect::StartOnNode { id, request } => {
                    assert!(self.new.contains(&id) && !self.removed.contains(&id));
                    assert!(self.sent.insert(id), "job {id} was sent twice");
                    let of = (request.node, request.systemd_unit);
                    assert_eq!(self.running.insert(of, id), None, "two running jobs of one unit");
                }
                Effect::CancelOnNode { id, .. } => assert!(self.sent.contains(&id)),
                Effect::StateChanged { id, .. } => assert!(!self.removed.contains(&id)),
                Effect::JobRemoved { removed, .. } => {
                    assert!(self.new.contains(&removed.id));
                    assert!(self.removed.insert(removed.id), "two JobRemoved of {}", removed.id);
                    let of = (removed.node, removed.systemd_unit);
                    if self.running.get(&of) == Some(&removed.id) {
                        self.running.remove(&of);
                    }
                }
            }
        }
    }
}

/// Whether the node has not answered yet.
fn is_sent(job: &Job<(), Duration>) -> bool {
    matches!(job.phase, Phase::Sent { .. })
}

fn apply(queue: &mut Queue, event: Event) -> Vec<Effect<()>> {
    let name = |node: u8| -> NodeName { format!("n{node}").parse().unwrap() };
    match event {
        Event::Submit { node, unit, mode } => {
            let wanted = request(&format!("n{node}"), &format!("{unit}.service"), mode);
            queue.submit(wanted, T).map_or_else(|_| Vec::new(), |(_, effects)| effects)
        }
        Event::Cancel(id) => queue.cancel(id, T).unwrap_or_default(),
        Event::Accepted(id) => queue.accepted(id, T),
        Event::Refused(id) if queue.get(id).is_some_and(is_sent) => queue.refused(id, T),
        Event::Unanswered(id) if queue.get(id).is_some_and(is_sent) => queue.unanswered(id, T),
        Event::Refused(_) | Event::Unanswered(_) => Vec::new(),
        Event::Done { node, id, result } => queue.done(&name(node), id, result, T),
        Event::State { node, id, state } => queue.state_changed(&name(node), id, state),
        Event::Lost(node) => queue.node_lost(&name(node), T),
        Event::Stop => queue.stop(T),
    }
}

proptest! {
    #[test]
    fn every_job_ends_in_exactly_one_job_removed(events in events()) {
        let (mut queue, mut seen) = (Queue::default(), Seen::default());
        for event in events {
            seen.observe(apply(&mut queue, event));
            let alive: BTreeSet<u32> = queue.ids().collect();
            let expected: BTreeSet<u32> = seen.new.difference(&seen.removed).copied().collect();
            prop_assert_eq!(alive, expected);
            for (of, id) in &seen.running {
                prop_assert_eq!(queue.slots[&of.0][&of.1].running, *id);
            }
        }
        // The nodes report the end of every job that was sent to them.
        loop {
            let Some(id) = queue.ids().find(|id| seen.sent.contains(id)) else { break };
            let node = queue.get(id).unwrap().node.clone();
            seen.observe(queue.accepted(id, T));
            seen.observe(queue.done(&node, id, JobResult::Done, T));
        }
        prop_assert!(queue.is_empty() && queue.slots.is_empty(), "{queue:?}");
        prop_assert_eq!(seen.new, seen.removed);
    }
}
