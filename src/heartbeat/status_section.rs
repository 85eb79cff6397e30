//! The heartbeat's section of `juju status`: the health of machines that send beats.

use std::collections::BTreeSet;

use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::bucket_of;
use crate::heartbeat::store;
use crate::model::MachineId;
use crate::runtime::clock::utc;
use crate::status::sections::{Health, Heartbeat};
use crate::store::Error;
use crate::store::tree::Tree;

/// Reads the health of machines, by the rule that the judge applies.
pub async fn read<T: Tree>(
    tree: &T,
    machines: impl Iterator<Item = MachineId> + Clone,
) -> Result<Heartbeat, Error> {
    let names: BTreeSet<Name> = machines.clone().map(Name::of_machine).collect();
    let store::Overview { records, problems, .. } = store::overview_of(tree, &names).await?;
    let unread = machines.filter_map(|machine| {
        let problem = problems.get(&bucket_of(Name::of_machine(machine).as_str()))?;
        Some((machine, Err(problem.to_string())))
    });
    // Without a tracker the stored states are not kept up to date.
    let judged = records.is_empty() || !store::replicas(tree).await?.is_empty();
    let health = records.into_iter().filter_map(|record| {
        let (_, flag) = record.notification?.state_and_flag();
        let health = if judged { record.state.as_str() } else { "unknown" }.to_owned();
        Some((
            record.name.machine()?,
            Ok(Health { health, flag: flag.to_owned(), last_beat: utc(record.beat_at) }),
        ))
    });
    Ok(Heartbeat(health.chain(unread).collect()))
}
