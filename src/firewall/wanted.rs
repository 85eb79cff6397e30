//! The rules that a machine should have, by unit. Pure. Computes them from the claims of one
//! machine's units, with all ports that are held back and why. An unreadable unit neither gains nor
//! loses rules.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::rule::{Cidr, Family, PortRange, Rule, RuleSet};

use super::policy::{Denial, Policy};
use crate::model::UnitId;

/// The request of one unit on the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortRequest {
    /// The service is exposed to these sources.
    Exposed { ports: Vec<PortRange>, sources: Vec<Cidr> },
    /// The service is not exposed: the unit's ports stay closed.
    NotExposed,
    /// A znode of the unit is unreadable: the unit keeps its rules and gets no new ones.
    Frozen { reason: String },
}

/// The rules that a machine should have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wanted {
    /// The rules that each unit may have open.
    pub granted: BTreeMap<UnitId, RuleSet>,
    pub denied: Vec<DeniedPort>,
    pub frozen: BTreeMap<UnitId, String>,
}

/// A requested port that stays closed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeniedPort {
    pub unit: UnitId,
    pub ports: PortRange,
    pub reason: Denial,
}

impl Wanted {
    /// The union of the rules of all units.
    pub fn rules(&self) -> RuleSet {
        if self.granted.len() == 1 {
            return self.granted.values().next().cloned().unwrap_or_default();
        }
        self.granted.values().flat_map(RuleSet::rules).collect()
    }
}

/// Applies the policy to the claims of one machine's units. `families` are the address families
/// that the machine can have rules for.
pub fn wanted(requests: &BTreeMap<UnitId, PortRequest>, families: &[Family], policy: &Policy) -> Wanted {
    let mut wanted = Wanted::default();
    for (&unit, request) in requests {
        match request {
            PortRequest::NotExposed => {}
            PortRequest::Frozen { reason } => {
                wanted.frozen.insert(unit, reason.clone());
            }
            PortRequest::Exposed { ports, sources } => {
                let mut granted: Vec<Rule> = Vec::new();
                for &ports in ports {
                    for &source in sources.iter().filter(|source| families.contains(&source.family())) {
                        if policy.allows_all(ports, source) {
                            granted.push(Rule::new(ports, source));
                            continue;
                        }
                        let (allowed, held) = policy.check(ports, source);
                        granted.extend(allowed.rules());
                        for (ports, reason) in held {
                            let back = DeniedPort { unit, ports, reason };
                            if !wanted.denied.contains(&back) {
                                wanted.denied.push(back);
                            }
                        }
                    }
                }
                wanted.granted.insert(unit, granted.into_iter().collect());
            }
        }
    }
    limit_rules(&mut wanted, policy.max_rules());
    wanted
}

/// Holds back rules beyond the maximum for a machine, those of the last units first. Rules are
/// counted after merging, because adjacent ports are one rule.
fn limit_rules(wanted: &mut Wanted, max: usize) {
    let fits = |rules: &RuleSet| [Family::V4, Family::V6].iter().all(|family| rules.len_of(*family) <= max);
    // Merging can only reduce this number.
    let at_most: usize = wanted.granted.values().map(RuleSet::len).sum();
    if at_most <= max || fits(&wanted.rules()) {
        return;
    }
    let mut so_far = RuleSet::new();
    for (&unit, granted) in &mut wanted.granted {
        let mut kept = Vec::new();
        // A port may exceed the limit for many sources, and is reported once.
        let mut held = BTreeSet::new();
        for rule in granted.rules() {
            if so_far.meets(&rule) || so_far.len_of(rule.source.family()) < max {
                so_far.insert(&rule);
                kept.push(rule);
            } else {
                held.insert(rule.ports);
            }
        }
        *granted = kept.into_iter().collect();
        let reason = Denial::TooManyRules { max };
        wanted.denied.extend(held.into_iter().map(|ports| DeniedPort {
            unit,
            ports,
            reason: reason.clone(),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::rule::Protocol;

    const V4: &[Family] = &[Family::V4];

    fn tcp(port: u16) -> PortRange {
        PortRange::single(port, Protocol::Tcp).unwrap()
    }

    fn asks(ports: &[u16]) -> PortRequest {
        PortRequest::Exposed {
            ports: ports.iter().map(|port| tcp(*port)).collect(),
            sources: vec![Cidr::WORLD_V4, Cidr::WORLD_V6],
        }
    }

    fn requests(requests: Vec<PortRequest>) -> BTreeMap<UnitId, PortRequest> {
        requests.into_iter().enumerate().map(|(n, request)| (UnitId::new(n as u32), request)).collect()
    }

    fn texts(rules: &RuleSet) -> Vec<String> {
        rules.rules().map(|rule| rule.to_string()).collect()
    }

    #[test]
    fn only_exposed_units_have_ports_and_two_may_share_one() {
        let policy = Policy::with_own_ports([]);
        let requests = requests(vec![asks(&[80, 443]), asks(&[80]), PortRequest::NotExposed]);
        let wanted = wanted(&requests, V4, &policy);
        assert_eq!(texts(&wanted.rules()), ["80/tcp from 0.0.0.0/0", "443/tcp from 0.0.0.0/0"]);
        assert_eq!(wanted.granted.len(), 2);
    }

    #[test]
    fn families_are_those_of_the_machine() {
        let policy = Policy::with_own_ports([]);
        let both = wanted(&requests(vec![asks(&[80])]), &[Family::V4, Family::V6], &policy);
        assert_eq!(texts(&both.rules()), ["80/tcp from 0.0.0.0/0", "80/tcp from ::/0"]);
    }

    #[test]
    fn forbidden_ports_are_held_back_once_and_others_open() {
        let policy = Policy::with_own_ports([]);
        let wanted = wanted(&requests(vec![asks(&[22, 80])]), &[Family::V4, Family::V6], &policy);
        assert_eq!(
            wanted.denied,
            [DeniedPort { unit: UnitId::new(0), ports: tcp(22), reason: Denial::ForbiddenPort }]
        );
        assert!(wanted.rules().contains(80, Protocol::Tcp, Cidr::WORLD_V4));
    }

    #[test]
    fn unreadable_units_request_no_ports() {
        let frozen = PortRequest::Frozen { reason: "garbage".into() };
        let wanted = wanted(&requests(vec![frozen, asks(&[80])]), V4, &Policy::with_own_ports([]));
        assert_eq!(wanted.frozen.get(&UnitId::new(0)).map(String::as_str), Some("garbage"));
        assert_eq!(texts(&wanted.rules()), ["80/tcp from 0.0.0.0/0"]);
    }

    #[test]
    fn too_many_rules_hold_back_the_last_ones() {
        let policy = Policy::parse("max-rules: 2", []).unwrap();
        let wanted = wanted(&requests(vec![asks(&[10, 11, 20]), asks(&[11, 30])]), V4, &policy);
        assert_eq!(texts(&wanted.rules()), ["10-11/tcp from 0.0.0.0/0", "20/tcp from 0.0.0.0/0"]);
        let held: Vec<_> = wanted.denied.iter().map(|held| (held.unit, held.ports)).collect();
        assert_eq!(held, [(UnitId::new(1), tcp(30))]);
    }

    #[test]
    fn very_many_rules_are_held_back_once_each() {
        let policy = Policy::with_own_ports([]);
        let sources = (0..50_u32).map(|n| format!("10.{n}.0.0/16").parse().unwrap()).collect();
        let ports = (0..1_000).map(|n| tcp(20_001 + 2 * n)).collect();
        let asks = PortRequest::Exposed { ports, sources };
        let wanted = wanted(&requests(vec![asks.clone(), asks]), V4, &policy);
        assert_eq!(wanted.rules().len_of(Family::V4), policy.max_rules());
        let told: BTreeSet<_> = wanted.denied.iter().map(|h| (h.unit, h.ports)).collect();
        assert_eq!((told.len(), wanted.denied.len() <= 2_000), (wanted.denied.len(), true));
    }
}
