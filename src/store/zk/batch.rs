//! Many reads in few requests, of a size that a store answers.

use std::future::Future;

use zookeeper_client as zk;

/// Questions per batch. All batches are sent at once, so this bounds a frame and not the speed.
const BATCH: usize = 500;

/// Sends every batch before it waits for the first, so that many take no longer than one. A batch whose
/// answer is too large for the store is asked again in halves: one large node must not hide the others.
pub(super) async fn ask_all(
    client: zk::Client,
    questions: &[(bool, String)],
) -> Result<Vec<zk::MultiReadResult>, zk::Error> {
    let mut pending = Vec::with_capacity(questions.len() / BATCH + 1);
    for batch in questions.chunks(BATCH) {
        pending.push((batch, ask(&client, batch)?));
    }
    let mut results = Vec::with_capacity(questions.len());
    for (batch, answer) in pending {
        match answer.await {
            Err(zk::Error::MarshallingError) => results.extend(ask_in_halves(&client, batch).await?),
            answer => results.extend(answer?),
        }
    }
    Ok(results)
}

fn ask<'a>(
    client: &'a zk::Client,
    batch: &[(bool, String)],
) -> Result<impl Future<Output = Result<Vec<zk::MultiReadResult>, zk::Error>> + Send + 'a, zk::Error> {
    let mut reader = client.new_multi_reader();
    for (data, path) in batch {
        if *data { reader.add_get_data(path)? } else { reader.add_get_children(path)? }
    }
    Ok(reader.commit())
}

/// Asks a batch that was too large, in parts that are not. A single question that is too large is an error.
async fn ask_in_halves(
    client: &zk::Client,
    batch: &[(bool, String)],
) -> Result<Vec<zk::MultiReadResult>, zk::Error> {
    let mut results = Vec::with_capacity(batch.len());
    let mut parts = vec![batch];
    while let Some(part) = parts.pop() {
        match ask(client, part)?.await {
            Err(zk::Error::MarshallingError) if part.len() > 1 => {
                let (first, second) = part.split_at(part.len() / 2);
                parts.extend([second, first]);
            }
            answer => results.extend(answer?),
        }
    }
    Ok(results)
}
