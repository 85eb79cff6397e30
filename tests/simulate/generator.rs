//! Chooses the next action, and the pause after it.

use std::time::Duration;

use crate::LATENCIES_MS;
use crate::actions::Action;
use crate::faults::{Fault, Kind, Mishap};
use crate::port_bits::ARGUMENTS;
use crate::record::Armed;
use crate::world::World;

impl World {
    /// An action of an operator or a hook.
    pub(crate) fn choose_operation(&mut self) -> Action {
        let provisions = self.provisions;
        let random = &mut self.random;
        let (any, other) = (random.below(60), random.below(60));
        match random.below(24) {
            0..=7 => Action::Open(any, other % ARGUMENTS.len()),
            8..=10 => Action::Close(any, other % ARGUMENTS.len()),
            11..=14 => Action::Expose(any),
            15 => Action::ExposeTo(any, other),
            16..=17 => Action::Unexpose(any),
            // Worlds that provision need more changes of machines.
            18 | 19 if provisions && other % 3 == 0 => Action::AddMachine,
            21 if provisions && other % 3 == 0 => Action::Terminate(any),
            18 => Action::AddUnit(any, other),
            19 => Action::RemoveUnit(any),
            20 => Action::Destroy(any),
            21 => Action::Deploy(any, other),
            22 => {
                if other % 2 == 0 {
                    Action::AddMachine
                } else {
                    Action::Terminate(any)
                }
            }
            _ => Action::Flood(5 + other / 2),
        }
    }

    fn choose_disturbance(&mut self) -> Action {
        let (agents, provisions) = (self.agents(), self.provisions);
        let random = &mut self.random;
        let (any, other, agent) = (random.below(60), random.below(60), random.below(agents));
        match random.below(40) {
            0..=2 => Action::Corrupt(Mishap::CorruptPorts, any, other),
            3 => Action::Corrupt(Mishap::CorruptUnit, any, other),
            4 => Action::Corrupt(Mishap::CorruptFlag, any, other),
            5 if other % 2 == 0 => Action::DeleteNodes(
                random.pick(&[Mishap::UnitNodesDeleted, Mishap::ServiceNodesDeleted]),
                any,
            ),
            5 => Action::Corrupt(Mishap::CorruptMachine, any, other),
            6 => Action::Corrupt(Mishap::CorruptReport, any, other),
            7 => Action::OlderRecord(any),
            8 => Action::NewerRecord(any),
            9..=10 => Action::RepairStore,
            11 if provisions && other % 3 == 0 => Action::EditRules(Mishap::NameTaken, any),
            11..=13 => {
                let what = [
                    Mishap::RuleRemoved,
                    Mishap::RuleAdded,
                    Mishap::ForeignAdded,
                    Mishap::ForeignEqual,
                    Mishap::GroupDrift,
                    Mishap::GroupDeleted,
                ];
                Action::EditRules(random.pick(&what), any)
            }
            14 if provisions && other % 2 == 0 => Action::Provider(Mishap::NoLaunchDeduplication, any),
            14..=15 => {
                let what = [
                    Mishap::DescribeLags,
                    Mishap::RewritesRanges,
                    Mishap::SplitsRanges,
                    Mishap::RefusesDuplicates,
                    Mishap::Quota,
                ];
                Action::Provider(random.pick(&what), any)
            }
            16 => Action::FailCalls(2 + any % 4),
            17..=20 => Action::EndProviderFaults,
            21 => Action::Interrupt,
            22 => Action::Expire(agent),
            23 => Action::Crash(agent),
            24 => Action::Stop(agent),
            25 => Action::Freeze(agent, random.pick(&[500, 4_000, 30_000])),
            26 => Action::Jump(random.pick(&[2_000, 20_000, 3_600_000])),
            27..=28 => {
                let what = [Mishap::EventMissed, Mishap::EventDoubled, Mishap::EventReordered];
                Action::Events(random.pick(&what), 1 + any % 3)
            }
            29 => Action::Backup,
            30 => Action::Restore,
            31 if provisions => Action::LoseInstance(any),
            32 => Action::Latency(random.pick(&LATENCIES_MS)),
            33 => Action::SetTimeOfDay(random.pick(&[-30, -1, 1, 24 * 365])),
            34 => Action::RateLimit(random.pick(&[300, 1_100, 3_500])),
            _ => self.choose_armed_fault(),
        }
    }

    fn choose_armed_fault(&mut self) -> Action {
        // Calls that only provisioning agents make are rare, so half of the faults are for them.
        let provisioning = self.provisions && self.random.one_in(2);
        loop {
            let (fault, kind) = (self.random.pick(Fault::ALL), self.random.pick(Kind::ALL));
            if fault.possible_at(kind) && kind.is_provisioning() == provisioning {
                let skip = if self.random.one_in(3) { self.random.below(6) as u64 } else { 0 };
                return Action::Arm(Armed { fault, kind: Some(kind), skip });
            }
        }
    }

    pub(crate) fn choose_event_without_faults(&mut self) -> (Action, Duration) {
        let pause = self.random.pick(&[0, 2, 9, 300, 5_100, 5_100]);
        (self.choose_operation(), Duration::from_millis(pause))
    }

    pub(crate) fn choose_event(&mut self) -> (Action, Duration) {
        let accepts = self.unaccepted && self.random.one_in(4);
        let action = if accepts {
            Action::Accept
        } else if self.random.one_in(2) {
            self.choose_operation()
        } else {
            self.choose_disturbance()
        };
        let pause = match self.random.below(40) {
            0 => 350_000,
            1..=2 => 110_000,
            _ => self.random.pick(&[0, 0, 1, 4, 6, 20, 300, 1_500, 9_000]),
        };
        (action, Duration::from_millis(pause))
    }
}
