//! Deliberate bugs, one for each mistake that was made once or is likely. They exist only with the
//! feature `mutants`, for the test that checks that the simulator finds each of them. Without the
//! feature [`is_active`] is the constant `false`, and the compiler removes the bugs.

/// Returns whether a deliberate bug is active: `mutant!(NoLease)`.
#[macro_export]
macro_rules! mutant {
    ($name:ident) => {
        $crate::mutants::is_active($crate::mutants::Mutant::$name)
    };
}

macro_rules! mutants {
    ($($(#[doc = $why:literal])+ $name:ident,)+) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Mutant { $($(#[doc = $why])+ $name,)+ }

        impl Mutant {
            pub const ALL: &[Mutant] = &[$(Mutant::$name,)+];

            /// Returns the effect of the bug.
            pub fn why(self) -> &'static str {
                match self { $(Mutant::$name => concat!($($why,)+),)+ }
            }
        }
    };
}

mutants!(
    /// A machine is changed again without reading its rules after a failed call: a batch that is
    /// refused as a whole is refused for ever.
    StaleRulesUsedAfterFailure,
    /// Every renewal of the lease postpones the read that confirms a mass close.
    NoConfirmingRead,
    /// Rules that are missing in a single read of the store are closed at once.
    MassCloseNotConfirmed,
    /// A confirmed close that was not begun in the same pass must be confirmed again: with a slow
    /// provider it is never sent.
    ConfirmationsNotKept,
    /// The share of closes is computed for each pass alone: machines that become readable one by
    /// one are closed one by one.
    MassCloseCheckedPerPass,
    /// A read without any units is not confirmed if there is little to close.
    EmptyReadNotConfirmed,
    /// A missing record that other records still refer to counts as removed, and its ports are
    /// closed.
    MissingRecordCountsAsRemoved,
    /// Ports are closed at once for an exposed flag that a client removes while it deletes the
    /// whole service.
    LostFlagNotConfirmed,
    /// After a failure of the store the agent uses its old view, as if it had missed no events.
    ViewKeptAfterStoreFailure,
    /// A leader that is elected again uses the state of its last lease.
    CachesKeptAcrossLeases,
    /// Ports that cannot be parsed count as none, and the unit's open ports are closed.
    InvalidPortsCountAsNone,
    /// A removed machine is retried without a pause, for ever.
    RemovedMachineRetried,
    /// An applied change is not recorded, and is made again with the next one.
    AppliedChangeNotCached,
    /// A range with a new spelling is closed although the new spelling could not be opened.
    ReplacedRuleClosedFirst,
    /// If a unit cannot be read and its last rules are unknown, all its rules are closed.
    UnknownLastRulesCountAsNone,
    /// Rules that were opened just before a crash are closed if their unit cannot be read
    /// afterwards.
    UnreportedOpenClosed,
    /// A rule that was added by hand keeps a wider rule of ours open for ever.
    ForeignRuleBlocksClose,
    /// The policy is not applied.
    PolicyNotApplied,
    /// Ports of services that are not exposed are opened.
    UnexposedPortsOpened,
    /// A service that is exposed to some sources is open to the world.
    ExposedSourcesIgnored,
    /// A change of an exposed flag takes effect only at the next resync.
    ExposedFlagEventsIgnored,
    /// No reports are written.
    ReportsNotWritten,
    /// A report that cannot be parsed is not replaced.
    InvalidReportNotReplaced,
    /// Every pass writes every report.
    UnchangedReportsWritten,
    /// Reports of removed machines are not deleted.
    ReportsOfRemovedMachinesKept,
    /// Failures are retried without a pause.
    RetriesWithoutPause,
    /// Failures are not retried.
    FailuresNotRetried,
    /// After an operator has fixed a problem, the retry comes an hour later.
    RetryPauseOfAnHour,
    /// Lost events and manual changes are never detected.
    NoResync,
    /// A short outage of the store ends the agent.
    ExitsOnStoreOutage,
    /// SIGTERM is ignored.
    StopRequestIgnored,
    /// A leader that was paused acts although another one has been elected.
    LeaseNotChecked,
    /// The lease is checked before waiting for the provider's rate limit, and not after it.
    LeaseNotCheckedAfterRateLimit,
    /// Closes wait in the same queue as opens, behind them.
    ClosesQueuedBehindOpens,
    /// A leader that was replaced continues to write.
    WritesWithoutFence,
    /// Only the first of several simultaneous events is processed.
    SimultaneousEventsDropped,
    /// After a reconnect, changes that were missed meanwhile are not read.
    ReconnectsIgnored,
    /// A machine whose launch was interrupted gets a second instance.
    InterruptedLaunchRepeated,
    /// If a machine has two instances, both are kept.
    DuplicateInstanceKept,
    /// An adopted instance is terminated with its machine.
    AdoptedInstanceTerminated,
    /// A read without any machines terminates all instances at once.
    MassTerminationNotConfirmed,
    /// Groups of removed machines are not deleted.
    GroupsNotDeleted,
    /// The ports of a removed machine stay open until its instance has ended.
    PortsOfRemovedMachineLeftOpen,
    /// Missing instances are never reported.
    MissingInstanceNotReported,
    /// If one machine's record cannot be parsed, no machine is processed.
    InvalidRecordBlocksAllMachines,
    /// The shared group is deleted together with the groups of removed machines.
    SharedGroupDeletedTooEarly,
    /// The shared group is not deleted after the last machine, and blocks the next environment of
    /// that name.
    SharedGroupNotDeleted,
    /// The retry of a launch that waits for a confirming read stays due, and causes one pass after
    /// another.
    WaitingLaunchRetriedAtOnce,
    /// Passes for retries do not process events.
    EventsIgnoredDuringRetries,
    /// Agents trust a store that was restored from an older backup, and remove everything made
    /// after the backup.
    RestoredStoreTrusted,
    /// Changes that were not begun before the lease ended count as applied.
    UnsentChangeCountsAsApplied,
    /// Heartbeats: the hold of a mass outage ends once enough components are back, and the rest are
    /// declared dead.
    HoldEndsWithTheShare,
    /// Heartbeats: a state manager that is reachable again gets its first call half a minute later.
    ProbesSeldom,
    /// Heartbeats: a component whose tracker has lost the store is declared dead.
    ForgetsLostTrackers,
    /// Heartbeats: a tracker that has lost the store continues to accept beats that it cannot
    /// forward.
    TakesBeatsForEver,
    /// Heartbeats: components that the store has lost are not written again.
    TrustsAnEmptyStore,
    /// Heartbeats: a new judge's sequence numbers begin at the wall-clock time alone, which may be
    /// behind those of earlier judges.
    RepeatsNumbers,
    /// Heartbeats: a new judge's sequence numbers begin above those in the store alone, which may
    /// have been restored from a backup.
    NumbersFromStoreOnly,
    /// Heartbeats: a call that timed out and is applied late leaves an old state with the state
    /// manager.
    ForgetsLateCalls,
    /// A denied request is sent again at every resync.
    DeniedRequestRepeated,
    /// A port that the provider refuses keeps the other ports of the same request closed.
    RefusedPortBlocksOthers,
    /// Adjacent ports are merged only after a group is full, which closes a wanted port meanwhile.
    PortsJoinedOnlyWhenFull,
    /// Fleet: the jobs of a lost node do not end.
    JobsOfLostNodesKept,
    /// Fleet: the result of a job that arrives before its acceptance is ignored.
    EarlyResultsIgnored,
    /// Fleet: a job that waits behind another one is never sent to its node.
    WaitingJobsNeverSent,
    /// Fleet: the end of a cancelled job is reported twice.
    CancelledJobsEndTwice,
    /// Fleet: a running job is not cancelled on its node.
    CancellationsNotSent,
    /// Fleet: an agent that connects again gets no subscriptions.
    NoSubscriptionsAfterReconnect,
    /// Fleet: the monitors of a client that has left remain.
    MonitorsOfLostClientsKept,
    /// Fleet: an agent without a manager stays subscribed to systemd.
    WatchesWithoutManager,
    /// Fleet: the job that stops a unit is sent to its node twice.
    JobsSentTwice,
);

impl Mutant {
    /// Bugs in the heartbeat tracker, which the heartbeat simulator has to find.
    pub const HEARTBEAT: &[Mutant] = &[
        Mutant::HoldEndsWithTheShare,
        Mutant::ProbesSeldom,
        Mutant::ForgetsLostTrackers,
        Mutant::TakesBeatsForEver,
        Mutant::TrustsAnEmptyStore,
        Mutant::RepeatsNumbers,
        Mutant::NumbersFromStoreOnly,
        Mutant::ForgetsLateCalls,
    ];

    /// Bugs in the fleet, which the simulator of the fleet has to find.
    pub const FLEET: &[Mutant] = &[
        Mutant::JobsOfLostNodesKept,
        Mutant::EarlyResultsIgnored,
        Mutant::WaitingJobsNeverSent,
        Mutant::CancelledJobsEndTwice,
        Mutant::CancellationsNotSent,
        Mutant::NoSubscriptionsAfterReconnect,
        Mutant::MonitorsOfLostClientsKept,
        Mutant::WatchesWithoutManager,
        Mutant::JobsSentTwice,
    ];
}

/// Returns whether the bug is active.
#[cfg(not(feature = "mutants"))]
#[inline]
pub const fn is_active(_: Mutant) -> bool {
    false
}

#[cfg(feature = "mutants")]
mod switch {
    use super::Mutant;
    use std::cell::Cell;

    thread_local!(static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) });

    /// Returns whether the bug is active in this thread.
    pub fn is_active(bug: Mutant) -> bool {
        ACTIVE.get() == Some(bug)
    }

    /// Activates one bug in this thread, or none.
    pub fn activate(bug: Option<Mutant>) {
        ACTIVE.set(bug);
    }
}

#[cfg(feature = "mutants")]
pub use switch::{activate, is_active};
