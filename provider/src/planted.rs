//! Mistakes to be found: each is a place where the code could be wrong in a way that somebody once was, or might be. They
//! are there only with the feature `planted`, for the test that sees that the simulator finds every one of them; without
//! it [`planted`] is a constant, and nothing of this is in a program.

macro_rules! bugs {
    ($($(#[doc = $why:literal])+ $name:ident,)+) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Bug { $($(#[doc = $why])+ $name,)+ }

        impl Bug {
            pub const ALL: &[Bug] = &[$(Bug::$name,)+];

            /// Why it matters.
            pub fn why(self) -> &'static str {
                match self { $(Bug::$name => concat!($($why,)+),)+ }
            }
        }
    };
}

bugs!(
    /// A machine is changed again without a look at what a failed call left: a batch that is refused whole is so for ever.
    KeepsWhatItSaw,
    /// The second look at a mass close is put off with every renewal of the lease.
    DoubtNeverRipens,
    /// Whatever a single look at the tree takes away is closed at once.
    NoSecondLook,
    /// A confirmed close that was not begun in the same pass must be confirmed again: with a slow provider it is never sent.
    ForgetsConfirmations,
    /// Closes are judged by those of one pass: machines that come back one by one are shut one by one.
    JudgesByPass,
    /// A tree that shows no units at all is believed at once if there is little to close.
    BelievesNothing,
    /// A missing record that other records still refer to counts as removed, and its ports are
    /// closed.
    MissingIsRemoved,
    /// After a failure of the store it goes on with what it had read before, as if nothing had been missed.
    KeepsItsView,
    /// Who leads again acts on what was true when it led before.
    RemembersItsLastReign,
    /// Ports that cannot be read are taken for none, and somebody's firewall is shut.
    GarbageIsNothing,
    /// A machine that is gone is tried again without a pause, for ever.
    NeverLetsGo,
    /// Our own change is not remembered, and made again with the next.
    ForgetsItsOwnChange,
    /// A range that is spelled anew is closed although the new spelling could not be opened.
    ClosesBeforeItOpens,
    /// Nothing is known of a unit that cannot be read, so all that it has is closed.
    NoMemoryIsNoPorts,
    /// What was opened just before a crash is closed if its unit cannot be read afterwards.
    ForgetsTheLastOpen,
    /// A rule that somebody made by hand keeps a wider one of ours open for ever.
    WaitsForOthers,
    /// Policy is not asked.
    NoPolicy,
    /// Ports of services that are not exposed are opened.
    ExposesAll,
    /// A service that is exposed to some is open to the world.
    ExposesToAll,
    /// An exposed flag is noticed only by the next resync.
    DeafToFlags,
    /// Nobody is told of anything.
    SaysNothing,
    /// A report that cannot be read is left as it is.
    KeepsGarbage,
    /// Every pass writes every report.
    RepeatsItself,
    /// Reports outlive their machines.
    ReportsOnTheGone,
    /// Failures are tried again at once.
    NoPause,
    /// Failures are not tried again.
    GivesUp,
    /// What an operator has put right is noticed after an hour.
    SulksForAnHour,
    /// Lost events and edits by hand are never found.
    NoResync,
    /// A store that is away for a moment ends the agent.
    DiesWithTheStore,
    /// SIGTERM is not heard.
    DeafToStop,
    /// A leader that was paused acts although another leads.
    NoLease,
    /// Whether it may act is asked before the wait for the provider's leave, and not after it.
    AsksOnce,
    /// Closes wait until opens have made room for them.
    ClosesQueueUp,
    /// A leader that was replaced goes on writing.
    NoFence,
    /// Of several events at once only the first is looked at.
    OneEventAtATime,
    /// What was missed while the connection was away is not looked for.
    IgnoresReconnects,
    /// A machine whose launch was cut off gets another instance.
    LaunchesBlindly,
    /// Two instances that one machine has got both stay.
    KeepsTheSurplus,
    /// An instance that somebody else made is ended with its machine.
    EndsWhatItAdopted,
    /// A tree that shows no machines ends all instances at once.
    EndsAtOnce,
    /// Groups outlive their machines.
    LeavesGroups,
    /// The ports of a machine that has left stay open until its instance has ended.
    LeavesPortsOpen,
    /// That an instance is gone is never said.
    SilentAboutTheGone,
    /// One machine that cannot be read keeps all others from being looked at.
    OneSpoilsAll,
    /// The group that all machines share goes with those of machines that are gone.
    SweepsTheShared,
    /// The group that all machines share outlives the last of them, and is in the way of the next environment of that name.
    LeavesTheShared,
    /// While there is something to do at once, nobody looks at what changes.
    DeafWhileLate,
    /// Agents trust a store that was restored from an older backup, and remove everything made after the backup.
    TrustsARestoredStore,
    /// What there was no time for while the lease lasted is taken for done.
    CallsItDone,
    /// Heartbeats: the hold of a mass outage ends once enough components are back, and the rest are declared dead.
    HoldEndsWithTheShare,
    /// Heartbeats: a state manager that is back gets its first call half a minute later.
    ProbesSeldom,
    /// Heartbeats: a component that beats to a tracker without the store is declared dead.
    ForgetsLostTrackers,
    /// Heartbeats: a tracker without the store goes on to accept beats that it cannot pass on.
    TakesBeatsForEver,
    /// Heartbeats: components that the store has lost are not written again.
    TrustsAnEmptyStore,
    /// Heartbeats: numbers of changes begin again at zero if the store has lost the epoch.
    RepeatsNumbers,
    /// Heartbeats: a call that timed out and is applied late leaves an old state with the state manager.
    ForgetsLateCalls,
    /// A denied request is sent again with every look at everything.
    RepeatsTheDenied,
    /// A port that the provider refuses keeps the other ports of the same request shut.
    OneRefusalForAll,
    /// Adjacent ports are joined only once a group is full, and a wanted port is shut for it.
    JoinsWhenFull,
);

impl Bug {
    /// Mistakes in the heartbeat tracker, which the heartbeat simulator has to find.
    pub const HEARTBEAT: &[Bug] = &[
        Bug::HoldEndsWithTheShare,
        Bug::ProbesSeldom,
        Bug::ForgetsLostTrackers,
        Bug::TakesBeatsForEver,
        Bug::TrustsAnEmptyStore,
        Bug::RepeatsNumbers,
        Bug::ForgetsLateCalls,
    ];
}

/// Whether the mistake is to be made.
#[cfg(not(feature = "planted"))]
#[inline]
pub const fn planted(_: Bug) -> bool {
    false
}

#[cfg(feature = "planted")]
mod switch {
    use super::Bug;
    use std::cell::Cell;

    thread_local!(static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) });

    /// Whether the mistake is to be made.
    pub fn planted(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }

    /// From now on this thread makes this mistake, or none.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
    }
}

#[cfg(feature = "planted")]
pub use switch::{plant, planted};
