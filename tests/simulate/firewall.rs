//! The firewall provider of an agent: every request passes through `interceptor`.

use std::collections::{BTreeMap, BTreeSet};

use portcullis::model::MachineId;
use portcullis_provider::memory::MemorySettings;
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Error, Firewall, Subject};
use tokio::time::Instant;

use crate::faults::{Fault, Kind};
use crate::interceptor::{HANG, Interceptor};
use crate::oracle::MAX_AGE;
use crate::port_bits::PortBits;

#[derive(Clone)]
pub(crate) struct SimFirewall {
    pub interceptor: Interceptor,
    pub agent: usize,
}

pub(crate) fn id(machine: MachineNumber) -> MachineId {
    MachineId::new(machine.get())
}

impl SimFirewall {
    /// Sends one request that changes the rules of one machine.
    async fn send_request(
        &self,
        kind: Kind,
        machine: MachineNumber,
        change: Change,
        (begun, until): (Instant, Instant),
    ) -> Result<(), Error> {
        // Like a driver: waits for the rate limit, then checks the deadline.
        self.interceptor.wait_for_rate_limit(kind, until).await;
        if Instant::now() >= until {
            return Err(Error::NotBegun { what: machine.into() });
        }
        self.interceptor.check_before_change(self.agent, kind, id(machine));
        let fault = self.interceptor.before(self.agent, kind, Some(id(machine))).await;
        let error = fault.and_then(|fault| fault.provider_error(Some(machine)));
        self.interceptor.lock().record_request(self.agent, kind, id(machine), fault == Some(Fault::Denied));
        let open = || self.interceptor.reachable(id(machine));
        let before = open();
        let result = match error {
            Some(error) if fault != Some(Fault::LostAfter) => Err(error),
            error => {
                let done = if self.has_refused_port(&change) {
                    let reason = "simulated".to_owned();
                    Err(Error::Invalid { what: Subject::Machine(machine), reason })
                } else if self.refuses(machine, &change) {
                    Err(Error::Conflict { what: Subject::Machine(machine) })
                } else {
                    let applied =
                        self.interceptor.provider.apply(machine, &change, Instant::now() + HANG).await;
                    applied.opened.and(applied.closed)
                };
                error.map_or(done, Err)
            }
        };
        self.interceptor.record_change(
            self.agent,
            kind,
            id(machine),
            (before, open()),
            begun,
            result.is_ok(),
        );
        let closed =
            change.close.iter().filter_map(PortBits::of_rule).filter(|rule| rule.minus(before).is_empty());
        self.interceptor.lock().check_closes(self.agent, id(machine), (closed, open()), begun);
        self.interceptor.after(self.agent, fault).await;
        result
    }

    fn has_refused_port(&self, change: &Change) -> bool {
        let refused = self.interceptor.lock().refused;
        change.open.iter().filter_map(PortBits::of_rule).any(|rule| !rule.and(refused).is_empty())
    }

    /// Like EC2: refuses a whole batch if any part of it is already in effect.
    fn refuses(&self, machine: MachineNumber, change: &Change) -> bool {
        let Some(rules) =
            self.interceptor.provider.actual(machine).filter(|_| self.interceptor.lock().refuses_duplicates)
        else {
            return false;
        };
        !change.open.is_disjoint(&rules.owned) || !change.close.is_subset(&rules.owned)
    }
}

impl Firewall for SimFirewall {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        let fault = self.interceptor.before(self.agent, Kind::Observe, None).await;
        for machine in machines.iter().copied().map(id) {
            self.interceptor.lock().record_request(
                self.agent,
                Kind::Observe,
                machine,
                fault == Some(Fault::Denied),
            );
        }
        if let Some(error) = fault.and_then(|fault| fault.provider_error(None)) {
            return Err(error);
        }
        let seen = self.interceptor.provider.observe(machines).await;
        self.interceptor.after(self.agent, fault).await;
        if let Ok(seen) = &seen {
            self.interceptor.record_read(self.agent, seen.keys().copied().map(id));
        }
        seen
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        let time = (Instant::now(), until);
        if change.is_empty() {
            return Applied::as_one(self.send_request(Kind::Repair, machine, Change::default(), time).await);
        }
        let mut applied = Applied::as_one(Ok(()));
        if !change.close.is_empty() {
            let close = Change { open: BTreeSet::new(), close: change.close.clone() };
            applied.closed = self.send_request(Kind::Close, machine, close, time).await;
        }
        if !change.open.is_empty() {
            let open = Change { open: change.open.clone(), close: BTreeSet::new() };
            applied.opened = self.send_request(Kind::Open, machine, open, time).await;
        }
        applied
    }

    fn rules_per_family(&self) -> Option<usize> {
        let most = self.interceptor.provider.rules_per_family();
        if most < MemorySettings::default().rules_per_family.into() {
            self.interceptor.lock().full_until = Instant::now() + MAX_AGE;
        }
        most
    }
}
