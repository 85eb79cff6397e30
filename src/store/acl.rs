//! The rights on each kind of znode. Applied when a znode is created, because rights are not
//! inherited and the right to delete a znode belongs to its parent. Only the CA certificate, which
//! every TLS handshake shows, is readable by the world, and nothing is writable by it. Pure.

use super::credentials::Identity;
use std::ops::BitOr;

/// A set of rights on one znode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights(u8);

impl Rights {
    pub const READ: Self = Self(1);
    pub const WRITE: Self = Self(2);
    pub const CREATE: Self = Self(4);
    pub const DELETE: Self = Self(8);
    pub const ADMIN: Self = Self(16);
    pub const ALL: Self = Self(31);

    /// ZooKeeper's bits.
    pub fn bits(self) -> u8 {
        self.0
    }

    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Rights {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The rights of digest identities on one znode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl {
    grants: Vec<(Identity, Rights)>,
    is_public: bool,
}

impl Acl {
    fn of(grants: Vec<(Identity, Rights)>) -> Self {
        Self { grants, is_public: false }
    }

    pub fn grants(&self) -> &[(Identity, Rights)] {
        &self.grants
    }

    /// Whether every client may read the znode, also without credentials.
    pub fn is_public(&self) -> bool {
        self.is_public
    }
}

/// The two identities of every environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roles {
    pub operator: Identity,
    pub controller: Identity,
}

impl Roles {
    fn acl(&self, controller: Rights, others: &[(&Identity, Rights)]) -> Acl {
        let mut grants = vec![(self.operator.clone(), Rights::ALL), (self.controller.clone(), controller)];
        grants.extend(others.iter().map(|(identity, rights)| ((*identity).clone(), *rights)));
        Acl::of(grants)
    }

    /// Root, containers, names, services, flags: written by the operator, read by the controller.
    pub fn operators(&self) -> Acl {
        self.acl(Rights::READ, &[])
    }

    /// The certificate of the environment's authority.
    pub fn authority(&self) -> Acl {
        Acl { is_public: true, ..self.operators() }
    }

    /// A machine's certificate signing request.
    pub fn machine_certificate_request(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::WRITE)])
    }

    /// A machine's certificate. The machine cannot write it.
    pub fn machine_certificate(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ | Rights::WRITE, &[(machine, Rights::READ)])
    }

    /// The flag of a service. Machines that run its units read the sources to open ports for.
    pub fn exposed(&self, service: Option<&Identity>) -> Acl {
        let service = service.map(|service| (service, Rights::READ));
        self.acl(Rights::READ, service.as_slice())
    }

    /// A service's secret. Its units carry a copy in their own credentials.
    pub fn service_credentials(&self) -> Acl {
        Acl::of(vec![(self.operator.clone(), Rights::ALL)])
    }

    /// The znodes of the controllers.
    pub fn controllers(&self) -> Acl {
        self.acl(Rights::READ | Rights::WRITE | Rights::CREATE | Rights::DELETE, &[])
    }

    /// The addresses of the leading manager, which every agent reads.
    pub fn manager_address(&self) -> Acl {
        Acl { is_public: true, ..self.controllers() }
    }

    /// A machine's record. The controller writes it from the provider's data and replaces the offer
    /// to a launched instance below; the machine reads it and may add znodes below, but cannot
    /// change its own instance id.
    pub fn machine(&self, machine: &Identity) -> Acl {
        let controller = Rights::READ | Rights::WRITE | Rights::CREATE | Rights::DELETE;
        self.acl(controller, &[(machine, Rights::READ | Rights::CREATE)])
    }

    /// The lease of the machine's agent.
    pub fn machine_agent(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ)])
    }

    /// A machine's report about its own firewall, and its change log below that.
    pub fn machine_firewall(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::WRITE | Rights::CREATE)])
    }

    /// A machine's report of its host name and addresses.
    pub fn machine_host(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::WRITE)])
    }

    /// A machine's report of what keeps it from running its units.
    pub fn machine_problem(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::WRITE)])
    }

    /// The checkpoint of a machine's agent.
    pub fn machine_checkpoint(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::WRITE)])
    }

    /// An operator's acceptance of a restored store. The machine reads it and cannot write it.
    pub fn machine_accepted(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ)])
    }

    /// The tombstone of a terminated machine. Its agent reads it and cannot write it.
    pub fn tombstone(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ)])
    }

    /// The offer to a host that joins as a machine. The holder of the one-time credential reads it
    /// and marks it as used.
    pub fn machine_join(&self, once: &Identity) -> Acl {
        self.acl(Rights::READ, &[(once, Rights::READ | Rights::WRITE)])
    }

    /// The entry of an added operator, which contains the credential of the first one.
    pub fn operator_entry(&self, added: &Identity) -> Acl {
        Acl::of(vec![(self.operator.clone(), Rights::ALL), (added.clone(), Rights::READ)])
    }

    /// The list of removed units whose `stop` hook failed. The machine keeps it.
    pub fn machine_stopping(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::CREATE | Rights::DELETE)])
    }

    /// The trackers that the machine may send beats to.
    pub fn machine_trackers(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ | Rights::WRITE, &[(machine, Rights::READ)])
    }

    /// The list of a machine's units, and its entries.
    pub fn machine_units(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ)])
    }

    /// A machine's secret: given to the machine when it is launched.
    pub fn machine_credentials(&self) -> Acl {
        self.acl(Rights::READ, &[])
    }

    /// A unit's record. Its machine reads it and may add agent and state below.
    pub fn unit(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::CREATE)])
    }

    /// The one znode that a unit may write.
    pub fn unit_ports(&self, machine: &Identity, unit: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ), (unit, Rights::READ | Rights::WRITE)])
    }

    /// The state of a unit's workflow.
    pub fn unit_state(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ | Rights::WRITE)])
    }

    /// The presence of a unit's agent.
    pub fn unit_agent(&self, machine: &Identity) -> Acl {
        self.acl(Rights::READ, &[(machine, Rights::READ)])
    }

    /// A charm. Its reader's identity is derived from the hash, which the records of its units
    /// contain.
    pub fn charm(&self, reader: &Identity) -> Acl {
        self.acl(Rights::READ, &[(reader, Rights::READ)])
    }

    /// A unit's secret: for the machine that runs its hooks, and not for the controller.
    pub fn unit_credentials(&self, machine: &Identity) -> Acl {
        Acl::of(vec![(self.operator.clone(), Rights::ALL), (machine.clone(), Rights::READ)])
    }
}
