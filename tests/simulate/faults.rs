//! Faults of calls, the kinds of call at which they are possible, and counts of how often each
//! fault occurred.

use portcullis::store::paths;
use portcullis::store::tree::Write;
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::{Error, Subject};

macro_rules! listed {
    ($(#[$doc:meta])* $name:ident { $($(#[$item_doc:meta])* $item:ident,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum $name { $($(#[$item_doc])* $item,)+ }

        impl $name {
            pub(crate) const ALL: &[$name] = &[$($name::$item,)+];
        }
    };
}

listed!(
    /// The calls that an agent makes.
    Kind {
        Get,
        /// Lists the names of all services, units and machines.
        ReadLists,
        /// Lists all machines, for provisioning.
        ReadMachines,
        ReadMany,
        Sync,
        Watch,
        /// Acquires the lock.
        WriteLock,
        /// Creates the agent's own znodes, once.
        WriteOwnNodes,
        WriteReports,
        /// Records the instance of a machine.
        WriteRecord,
        Observe,
        Open,
        Close,
        Repair,
        List,
        Launch,
        Adopt,
        EnsureGroup,
        Release,
        Terminate,
        RevokeAll,
        DeleteGroup,
    }
);

listed!(Fault {
    CrashBefore,
    CrashAfter,
    /// SIGTERM.
    Stop,
    /// The connection is lost before the call takes effect.
    LostBefore,
    /// The connection is lost, or the call times out, after it took effect.
    LostAfter,
    Expired,
    /// The server lags behind.
    Stale,
    /// Lists are returned empty.
    Empty,
    Denied,
    Throttled,
    Unavailable,
    Conflict,
    NotFound,
    Full,
    Slow,
    /// The process is frozen during the call, and its session may expire.
    Paused,
    /// Another action is performed during the call.
    ActionDuringCall,
});

impl Kind {
    pub(crate) fn of_write(writes: &[Write]) -> Kind {
        let under = |top: &str| writes.iter().any(|write| write.path().as_str().starts_with(top));
        let leader = paths::leader();
        if under(leader.as_str()) {
            Kind::WriteLock
        } else if under(paths::machines().as_str()) {
            Kind::WriteRecord
        } else if writes.iter().any(|w| w.path().as_str().contains("/machine-")) {
            Kind::WriteReports
        } else {
            Kind::WriteOwnNodes
        }
    }

    /// Whether only agents that provision make this call.
    pub(crate) fn is_provisioning(self) -> bool {
        self >= Kind::List || matches!(self, Kind::ReadMachines | Kind::WriteRecord)
    }

    pub(crate) fn is_store(self) -> bool {
        self < Kind::Observe
    }

    pub(crate) fn is_write(self) -> bool {
        !matches!(
            self,
            Kind::Get
                | Kind::ReadLists
                | Kind::ReadMachines
                | Kind::ReadMany
                | Kind::Sync
                | Kind::Watch
                | Kind::Observe
                | Kind::List
        )
    }
}

impl Fault {
    pub(crate) fn possible_at(self, kind: Kind) -> bool {
        let (store, write) = (kind.is_store(), kind.is_write());
        match self {
            Fault::CrashBefore | Fault::CrashAfter | Fault::Stop | Fault::LostBefore => true,
            Fault::Slow | Fault::Paused | Fault::ActionDuringCall => true,
            Fault::LostAfter => write,
            Fault::Expired => store,
            Fault::Stale => store && !write && kind != Kind::Sync,
            Fault::Empty => matches!(kind, Kind::ReadLists | Kind::ReadMachines),
            Fault::Denied | Fault::Throttled | Fault::Unavailable => !store,
            Fault::Conflict | Fault::NotFound => !store && write,
            Fault::Full => kind == Kind::Open,
        }
    }

    /// The provider's error for this fault, if it has one.
    pub(crate) fn provider_error(self, machine: Option<MachineNumber>) -> Option<Error> {
        let what = machine.map_or(Subject::Provider, Subject::Machine);
        let reason = "simulated".to_owned();
        Some(match self {
            Fault::Denied => Error::Denied { what, reason },
            Fault::Throttled => Error::Throttled { what },
            Fault::LostBefore | Fault::Unavailable => Error::Unavailable { what, reason },
            Fault::Conflict => Error::Conflict { what },
            Fault::NotFound => Error::NotFound { what },
            Fault::Full => Error::QuotaExceeded { what, limit: None },
            Fault::LostAfter => Error::Ambiguous { what, reason },
            _ => return None,
        })
    }
}

listed!(
    /// Events of a world other than faults of single calls.
    Mishap {
        EventMissed,
        EventDoubled,
        EventReordered,
        Interrupted,
        SessionExpired,
        Crashed,
        Stopped,
        FrozenProcess,
        ClockJumped,
        TimeOfDaySet,
        DescribeLags,
        RewritesRanges,
        SplitsRanges,
        RefusesDuplicates,
        Quota,
        /// The provider does not deduplicate launches.
        NoLaunchDeduplication,
        Latency,
        RateLimit,
        InstanceLost,
        RuleRemoved,
        RuleAdded,
        ForeignAdded,
        ForeignEqual,
        GroupDrift,
        GroupDeleted,
        /// A group cannot be deleted yet, because its instance still uses it.
        GroupInUse,
        /// The provider does not support IPv6 rules.
        NoIpv6,
        NameTaken,
        CorruptPorts,
        CorruptUnit,
        CorruptFlag,
        CorruptMachine,
        CorruptReport,
        /// Only the znodes of one unit are deleted.
        UnitNodesDeleted,
        /// Only the znodes of one exposed service are deleted.
        ServiceNodesDeleted,
        Truncated,
        TooLarge,
        DeeplyNested,
        OlderRecord,
        NewerRecord,
        UnitRemoved,
        ServiceDestroyed,
        NameUsedAgain,
        MachineGone,
        Restored,
        Flood,
    }
);

/// Counts each fault by kind of call, and each mishap.
#[derive(Debug, Clone)]
pub(crate) struct Coverage {
    cells: Vec<u64>,
    mishaps: Vec<u64>,
    pub calls: u64,
    pub events: u64,
    /// How often convergence was due and checked.
    pub convergence_checks: u64,
    pub simulated_ms: u64,
}

impl Default for Coverage {
    fn default() -> Self {
        Coverage {
            cells: vec![0; Kind::ALL.len() * Fault::ALL.len()],
            mishaps: vec![0; Mishap::ALL.len()],
            calls: 0,
            events: 0,
            convergence_checks: 0,
            simulated_ms: 0,
        }
    }
}

impl Coverage {
    pub(crate) fn count_fault(&mut self, fault: Fault, kind: Kind) {
        self.cells[fault as usize * Kind::ALL.len() + kind as usize] += 1;
    }

    pub(crate) fn count_mishap(&mut self, mishap: Mishap) {
        self.mishaps[mishap as usize] += 1;
    }

    pub(crate) fn add(&mut self, other: &Coverage) {
        self.cells.iter_mut().zip(&other.cells).for_each(|(mine, more)| *mine += more);
        self.mishaps.iter_mut().zip(&other.mishaps).for_each(|(mine, more)| *mine += more);
        self.calls += other.calls;
        self.events += other.events;
        self.convergence_checks += other.convergence_checks;
        self.simulated_ms += other.simulated_ms;
    }

    /// Possible faults and mishaps that never occurred.
    pub(crate) fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for &fault in Fault::ALL {
            for &kind in Kind::ALL.iter().filter(|kind| fault.possible_at(**kind)) {
                if self.cells[fault as usize * Kind::ALL.len() + kind as usize] == 0 {
                    missing.push(format!("{fault:?} at {kind:?}"));
                }
            }
        }
        let never = Mishap::ALL.iter().filter(|mishap| self.mishaps[**mishap as usize] == 0);
        missing.extend(never.map(|mishap| format!("{mishap:?}")));
        missing
    }

    /// All counts, as text.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        for &fault in Fault::ALL {
            let row = Kind::ALL.iter().filter(|kind| fault.possible_at(**kind)).map(|kind| {
                format!("{kind:?} {}", self.cells[fault as usize * Kind::ALL.len() + *kind as usize])
            });
            text += &format!("  {fault:?}: {}\n", row.collect::<Vec<_>>().join(", "));
        }
        let mishaps =
            Mishap::ALL.iter().map(|mishap| format!("{mishap:?} {}", self.mishaps[*mishap as usize]));
        text + "  " + &mishaps.collect::<Vec<_>>().join(", ") + "\n"
    }
}

#[test]
fn faults_that_never_occurred_are_listed() {
    let mut coverage = Coverage::default();
    for &fault in Fault::ALL {
        Kind::ALL
            .iter()
            .filter(|kind| fault.possible_at(**kind))
            .for_each(|kind| coverage.count_fault(fault, *kind));
    }
    Mishap::ALL.iter().filter(|what| **what != Mishap::Flood).for_each(|what| coverage.count_mishap(*what));
    assert_eq!(coverage.missing(), ["Flood"]);
    let mut other = Coverage::default();
    other.count_mishap(Mishap::Flood);
    assert!(other.missing().contains(&"CrashBefore at Get".to_owned()));
    coverage.add(&other);
    assert_eq!(coverage.missing(), Vec::<String>::new());
}
