//! The records of the log: changes that have passed all checks, so that replaying them gives the
//! same tree whatever checks a later version has. Pure.

use std::borrow::Cow;
use std::sync::Arc;

use super::acl::Acl;
use super::jute::{DecodeError, Put, Reader};
use super::proto::{decode_acl, encode_acl};

/// One change of one znode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<'a> {
    Create { path: Cow<'a, str>, data: Option<Cow<'a, [u8]>>, acl: Arc<Vec<Acl>>, owner: i64 },
    Delete { path: Cow<'a, str> },
    SetData { path: Cow<'a, str>, data: Option<Cow<'a, [u8]>> },
    SetAcl { path: Cow<'a, str>, acl: Arc<Vec<Acl>> },
}

pub type Password = [u8; 16];

/// All changes at one zxid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Txn<'a> {
    /// One write, or all of a multi.
    Changes(Vec<Change<'a>>),
    OpenSession {
        id: i64,
        timeout_ms: i32,
        password: Password,
    },
    /// Ends the session and deletes its ephemerals.
    CloseSession {
        id: i64,
    },
    /// The start of a server, whose zxids begin here.
    Epoch,
}

const CREATE: u8 = 1;
const DELETE: u8 = 2;
const SET_DATA: u8 = 3;
const SET_ACL: u8 = 4;
const CHANGES: u8 = 1;
const OPEN_SESSION: u8 = 2;
const CLOSE_SESSION: u8 = 3;
const EPOCH: u8 = 4;

impl Change<'_> {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Change::Create { path, data, acl, owner } => {
                out.push(CREATE);
                out.put_string(path);
                out.put_optional_buffer(data.as_deref());
                encode_acl(acl, out);
                out.put_i64(*owner);
            }
            Change::Delete { path } => {
                out.push(DELETE);
                out.put_string(path);
            }
            Change::SetData { path, data } => {
                out.push(SET_DATA);
                out.put_string(path);
                out.put_optional_buffer(data.as_deref());
            }
            Change::SetAcl { path, acl } => {
                out.push(SET_ACL);
                out.put_string(path);
                encode_acl(acl, out);
            }
        }
    }

    fn decode<'a>(r: &mut Reader<'a>) -> Result<Change<'a>, DecodeError> {
        let kind = r.u8()?;
        let path = Cow::Borrowed(r.string()?);
        Ok(match kind {
            CREATE => Change::Create {
                path,
                data: r.buffer()?.map(Cow::Borrowed),
                acl: Arc::new(decode_acl(r)?),
                owner: r.i64()?,
            },
            DELETE => Change::Delete { path },
            SET_DATA => Change::SetData { path, data: r.buffer()?.map(Cow::Borrowed) },
            SET_ACL => Change::SetAcl { path, acl: Arc::new(decode_acl(r)?) },
            other => return Err(DecodeError::BadValue(other.into())),
        })
    }
}

impl Txn<'_> {
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Txn::Changes(changes) => {
                out.push(CHANGES);
                out.put_len(changes.len());
                for change in changes {
                    change.encode(out);
                }
            }
            Txn::OpenSession { id, timeout_ms, password } => {
                out.push(OPEN_SESSION);
                out.put_i64(*id);
                out.put_i32(*timeout_ms);
                out.put_bytes(password);
            }
            Txn::CloseSession { id } => {
                out.push(CLOSE_SESSION);
                out.put_i64(*id);
            }
            Txn::Epoch => out.push(EPOCH),
        }
    }

    pub fn decode<'a>(r: &mut Reader<'a>) -> Result<Txn<'a>, DecodeError> {
        Ok(match r.u8()? {
            CHANGES => Txn::Changes(r.vector(5, Change::decode)?),
            OPEN_SESSION => {
                let (id, timeout_ms) = (r.i64()?, r.i32()?);
                let password = r.take(16)?.try_into().map_err(|_| DecodeError::Truncated)?;
                Txn::OpenSession { id, timeout_ms, password }
            }
            CLOSE_SESSION => Txn::CloseSession { id: r.i64()? },
            EPOCH => Txn::Epoch,
            other => return Err(DecodeError::BadValue(other.into())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::acl::Identity;

    #[test]
    fn transactions_round_trip() {
        let acl = Arc::new(vec![Acl { perms: 31, identity: Identity::new("world", "anyone") }]);
        let path = || Cow::Borrowed("/a/b");
        let all = [
            Txn::Changes(vec![
                Change::Create { path: path(), data: None, acl: acl.clone(), owner: i64::MIN },
                Change::Create { path: path(), data: Some(Cow::Borrowed(b"")), acl: acl.clone(), owner: 0 },
                Change::SetData { path: path(), data: Some(Cow::Borrowed(b"x")) },
                Change::SetAcl { path: path(), acl },
                Change::Delete { path: path() },
            ]),
            Txn::Changes(vec![]),
            Txn::OpenSession { id: -7, timeout_ms: 4000, password: [9; 16] },
            Txn::CloseSession { id: 1 },
            Txn::Epoch,
        ];
        let mut out = Vec::new();
        all.iter().for_each(|txn| txn.encode(&mut out));
        let mut reader = Reader::new(&out);
        for txn in &all {
            assert_eq!(Txn::decode(&mut reader).as_ref(), Ok(txn));
        }
        assert_eq!(reader.remaining(), 0);
    }
}
