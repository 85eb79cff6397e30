//! Combines many reads into few requests, small enough for the store's limit.

use std::future::Future;

use zookeeper_client as zk;

/// Reads per batch. All batches are sent at once, so this limits the size of a frame and not the
/// speed.
const BATCH: usize = 500;

/// Sends every batch before it waits for the first, so that many take no longer than one. A batch
/// whose reply is too large for the store is sent again in halves, so that one large node does not
/// make the others unreadable.
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

/// Sends a batch that was too large again in smaller parts. A single read that is too large is an
/// error.
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
