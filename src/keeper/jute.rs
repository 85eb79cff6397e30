//! Jute, ZooKeeper's wire encoding: big-endian numbers, length-prefixed buffers, counted vectors.
//! The reader borrows from the frame and checks every length and count before it is used. The
//! meaning of fields belongs in `proto.rs`. Pure.

/// The bytes are not a valid encoding of the requested field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the record ends before its last field")]
    Truncated,
    #[error("a length of {0} bytes does not fit in the record")]
    BadLength(i32),
    #[error("a string is not UTF-8")]
    NotUtf8,
    #[error("a required field is null")]
    Null,
    #[error("{0} is not a known value of its field")]
    BadValue(i64),
}

#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    pub fn take(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.rest.split_at_checked(n).ok_or(DecodeError::Truncated)?;
        self.rest = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, tail) = self.rest.split_first_chunk::<N>().ok_or(DecodeError::Truncated)?;
        self.rest = tail;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }

    pub fn bool(&mut self) -> Result<bool, DecodeError> {
        Ok(self.u8()? != 0)
    }

    pub fn i32(&mut self) -> Result<i32, DecodeError> {
        self.array().map(i32::from_be_bytes)
    }

    pub fn i64(&mut self) -> Result<i64, DecodeError> {
        self.array().map(i64::from_be_bytes)
    }

    /// Reads a buffer. Null (-1) and empty are different on the wire.
    pub fn buffer(&mut self) -> Result<Option<&'a [u8]>, DecodeError> {
        match self.i32()? {
            -1 => Ok(None),
            n => {
                let len = usize::try_from(n).map_err(|_| DecodeError::BadLength(n))?;
                self.take(len).map(Some).map_err(|_| DecodeError::BadLength(n))
            }
        }
    }

    pub fn string(&mut self) -> Result<&'a str, DecodeError> {
        let bytes = self.buffer()?.ok_or(DecodeError::Null)?;
        std::str::from_utf8(bytes).map_err(|_| DecodeError::NotUtf8)
    }

    /// Reads a vector; null becomes an empty one. The count is checked against the remaining bytes,
    /// so that a forged count cannot cause a large allocation.
    pub fn vector<T>(
        &mut self,
        min_item_len: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let n = self.i32()?;
        if n == -1 {
            return Ok(Vec::new());
        }
        let count = usize::try_from(n).map_err(|_| DecodeError::BadLength(n))?;
        if count.saturating_mul(min_item_len) > self.rest.len() {
            return Err(DecodeError::BadLength(n));
        }
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    pub fn strings(&mut self) -> Result<Vec<&'a str>, DecodeError> {
        self.vector(4, |r| r.string())
    }
}

/// Appends jute fields to a byte vector.
pub trait Put {
    fn put_bytes(&mut self, bytes: &[u8]);

    fn put_bool(&mut self, v: bool) {
        self.put_bytes(&[u8::from(v)]);
    }

    fn put_i32(&mut self, v: i32) {
        self.put_bytes(&v.to_be_bytes());
    }

    fn put_i64(&mut self, v: i64) {
        self.put_bytes(&v.to_be_bytes());
    }

    /// Appends a length. Lengths of frames and nodes are limited far below `i32::MAX`.
    fn put_len(&mut self, len: usize) {
        self.put_i32(i32::try_from(len).unwrap_or(i32::MAX));
    }

    fn put_buffer(&mut self, bytes: &[u8]) {
        self.put_len(bytes.len());
        self.put_bytes(bytes);
    }

    fn put_optional_buffer(&mut self, bytes: Option<&[u8]>) {
        match bytes {
            Some(bytes) => self.put_buffer(bytes),
            None => self.put_i32(-1),
        }
    }

    fn put_string(&mut self, s: &str) {
        self.put_buffer(s.as_bytes());
    }
}

impl Put for Vec<u8> {
    fn put_bytes(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn null_and_empty_buffers_differ() {
        let mut out = Vec::new();
        out.put_i32(-1);
        out.put_buffer(b"");
        let mut reader = Reader::new(&out);
        assert_eq!(reader.buffer(), Ok(None));
        assert_eq!(reader.buffer(), Ok(Some(&b""[..])));
    }

    #[test]
    fn lengths_beyond_the_record_are_refused() {
        for length in [-2, 5, i32::MAX, i32::MIN] {
            let mut out = Vec::new();
            out.put_i32(length);
            out.put_bytes(b"four");
            assert_eq!(Reader::new(&out).buffer(), Err(DecodeError::BadLength(length)));
        }
    }

    #[test]
    fn forged_count_is_refused_before_allocation() {
        let mut out = Vec::new();
        out.put_i32(i32::MAX);
        assert_eq!(Reader::new(&out).strings(), Err(DecodeError::BadLength(i32::MAX)));
    }

    #[test]
    fn strings_must_be_utf8() {
        let mut out = Vec::new();
        out.put_buffer(&[0xff, 0xfe]);
        assert_eq!(Reader::new(&out).string(), Err(DecodeError::NotUtf8));
    }

    proptest! {
        #[test]
        fn fields_round_trip(
            a in any::<i32>(), b in any::<i64>(), c in any::<bool>(), s in ".{0,40}", d in any::<Vec<u8>>()
        ) {
            let mut out = Vec::new();
            out.put_i32(a);
            out.put_i64(b);
            out.put_bool(c);
            out.put_string(&s);
            out.put_buffer(&d);
            let mut r = Reader::new(&out);
            prop_assert_eq!((r.i32(), r.i64(), r.bool()), (Ok(a), Ok(b), Ok(c)));
            prop_assert_eq!(r.string(), Ok(s.as_str()));
            prop_assert_eq!(r.buffer(), Ok(Some(d.as_slice())));
            prop_assert_eq!(r.remaining(), 0);
        }
    }
}
