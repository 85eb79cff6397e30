//! Deliberate bugs, one for each mistake that was made once or is likely. They exist only with the
//! feature `planted`, for the test that checks that the simulator finds each of them. Without the
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
    KeepsWhatItSaw,
    /// Every renewal of the lease postpones the read that confirms a mass close.
    DoubtNeverRipens,
    /// Rules that are missing in a single read of the store are closed at once.
    NoSecondLook,
    /// A confirmed close that was not begun in the same pass must be confirmed again: with a slow
    /// provider it is never sent.
    ForgetsConfirmations,
    /// The share of closes is computed for each pass alone: machines that become readable one by
    /// one are closed one by one.
    JudgesByPass,
    /// A read without any units is not confirmed if there is little to close.
    BelievesNothing,
    /// A missing record that other records still refer to counts as removed, and its ports are
    /// closed.
    MissingIsRemoved,
    /// After a failure of the store the agent uses its old view, as if it had missed no events.
    KeepsItsView,
    /// A leader that is elected again uses the state of its last lease.
    RemembersItsLastReign,
    /// Ports that cannot be parsed count as none, and the unit's open ports are closed.
    GarbageIsNothing,
    /// A removed machine is retried without a pause, for ever.
    NeverLetsGo,
    /// An applied change is not recorded, and is made again with the next one.
    ForgetsItsOwnChange,
    /// A range with a new spelling is closed although the new spelling could not be opened.
    ClosesBeforeItOpens,
    /// If a unit cannot be read and its last rules are unknown, all its rules are closed.
    NoMemoryIsNoPorts,
    /// Rules that were opened just before a crash are closed if their unit cannot be read
    /// afterwards.
    ForgetsTheLastOpen,
    /// A rule that was added by hand keeps a wider rule of ours open for ever.
    WaitsForOthers,
    /// The policy is not applied.
    NoPolicy,
    /// Ports of services that are not exposed are opened.
    ExposesAll,
    /// A service that is exposed to some sources is open to the world.
    ExposesToAll,
    /// A change of an exposed flag takes effect only at the next resync.
    DeafToFlags,
    /// No reports are written.
    SaysNothing,
    /// A report that cannot be parsed is not replaced.
    KeepsGarbage,
    /// Every pass writes every report.
    RepeatsItself,
    /// Reports of removed machines are not deleted.
    ReportsOnTheGone,
    /// Failures are retried without a pause.
    NoPause,
    /// Failures are not retried.
    GivesUp,
    /// After an operator has fixed a problem, the retry comes an hour later.
    SulksForAnHour,
    /// Lost events and manual changes are never detected.
    NoResync,
    /// A short outage of the store ends the agent.
    DiesWithTheStore,
    /// SIGTERM is ignored.
    DeafToStop,
    /// A leader that was paused acts although another one has been elected.
    NoLease,
    /// The lease is checked before waiting for the provider's rate limit, and not after it.
    AsksOnce,
    /// Closes wait in the same queue as opens, behind them.
    ClosesQueueUp,
    /// A leader that was replaced continues to write.
    NoFence,
    /// Only the first of several simultaneous events is processed.
    OneEventAtATime,
    /// After a reconnect, changes that were missed meanwhile are not read.
    IgnoresReconnects,
    /// A machine whose launch was interrupted gets a second instance.
    LaunchesBlindly,
    /// If a machine has two instances, both are kept.
    KeepsTheSurplus,
    /// An adopted instance is terminated with its machine.
    EndsWhatItAdopted,
    /// A read without any machines terminates all instances at once.
    EndsAtOnce,
    /// Groups of removed machines are not deleted.
    LeavesGroups,
    /// The ports of a removed machine stay open until its instance has ended.
    LeavesPortsOpen,
    /// Missing instances are never reported.
    SilentAboutTheGone,
    /// If one machine's record cannot be parsed, no machine is processed.
    OneSpoilsAll,
    /// The shared group is deleted together with the groups of removed machines.
    SweepsTheShared,
    /// The shared group is not deleted after the last machine, and blocks the next environment of
    /// that name.
    LeavesTheShared,
    /// Passes for retries do not process events.
    DeafWhileLate,
    /// Agents trust a store that was restored from an older backup, and remove everything made
    /// after the backup.
    TrustsARestoredStore,
    /// Changes that were not begun before the lease ended count as applied.
    CallsItDone,
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
    /// Heartbeats: sequence numbers of changes restart at zero if the store has lost the epoch.
    RepeatsNumbers,
    /// Heartbeats: a call that timed out and is applied late leaves an old state with the state
    /// manager.
    ForgetsLateCalls,
    /// A denied request is sent again at every resync.
    RepeatsTheDenied,
    /// A port that the provider refuses keeps the other ports of the same request closed.
    OneRefusalForAll,
    /// Adjacent ports are merged only after a group is full, which closes a wanted port meanwhile.
    JoinsWhenFull,
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
        Mutant::ForgetsLateCalls,
    ];
}

/// Returns whether the bug is active.
#[cfg(not(feature = "planted"))]
#[inline]
pub const fn is_active(_: Mutant) -> bool {
    false
}

#[cfg(feature = "planted")]
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

#[cfg(feature = "planted")]
pub use switch::{activate, is_active};
