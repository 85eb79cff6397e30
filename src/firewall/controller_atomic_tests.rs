//! Tests with a firewall that stores sets of ports, as nftables does: adjacent ports are shown as
//! one range, regardless of the unit that opened them, and a change is one transaction.

use super::*;
use portcullis_provider::Applied;
use portcullis_provider::provider::Seen;
use portcullis_provider::rule::RuleSet;

struct Merging(Memory);

impl Firewall for Merging {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, ProviderError> {
        self.0.observe(machines).await
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, _until: Instant) -> Applied {
        self.0.tamper(machine, |rules| {
            let there: RuleSet = rules.owned.iter().collect();
            let next = there.minus(&change.close.iter().collect()).union(&change.open.iter().collect());
            rules.owned = next.rules().collect();
        });
        Applied::as_one(Ok(()))
    }

    fn is_atomic(&self) -> bool {
        true
    }

    fn rules_per_family(&self) -> Option<usize> {
        None
    }
}

/// A port next to a closed port stays open, even if the data of its unit cannot be read.
#[tokio::test(start_paused = true)]
async fn one_of_two_adjacent_ports_is_closed() {
    for frozen in [false, true] {
        let mut world = World::new().await;
        let first = world.deploy("a").await;
        let second = world.deploy_on("b", MachineId::new(0)).await;
        world.open(first, "8080").await;
        world.open(second, "8081").await;
        world.expose("a").await;
        world.expose("b").await;
        let (tree, roles) = (world.controller.tree.clone(), world.operator.info().roles.clone());
        let policy = Policy::with_own_ports([2181]);
        let mut controller =
            FirewallController::new(tree, Merging(world.provider.clone()), policy, roles, || 0);
        controller.pass(&everything(), &world.lease).await.unwrap();
        assert_eq!(world.rules(0), ["8080-8081/tcp"]);
        if frozen {
            world.overwrite(paths::unit_ports(first), b"{garbage").await;
        }
        world.close(second, "8081").await;
        let mut dirty = everything();
        for _ in 0..3 {
            world.lease.confirm(world.operator.tree()).await.unwrap();
            controller.pass(&dirty, &world.lease).await.unwrap();
            dirty = Dirty::default();
        }
        assert_eq!(world.rules(0), ["8080/tcp"], "frozen: {frozen}");
        assert_eq!(controller.next_retry(), None);
    }
}
