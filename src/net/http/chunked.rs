//! Decodes a chunked body, strictly: every line ends with CRLF, sizes are plain hexadecimal
//! numbers, extensions and trailers are bounded and discarded. Pure.

use super::framing::Invalid;

/// A chunk's size with its extensions, or one trailer field.
const MAX_LINE: usize = 1024;

/// All trailers together.
const MAX_TRAILERS: usize = 8 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In a chunk's size, after this many digits.
    Size {
        digits: u8,
    },
    Extension,
    /// After the CR of a size line.
    SizeEnd,
    Data,
    /// After a chunk's data: CR, then LF.
    DataCr,
    DataLf,
    /// At the beginning of a line after the last chunk.
    TrailerStart,
    TrailerName,
    TrailerValue,
    TrailerLf,
    /// After the CR of the empty line.
    FinalLf,
    Done,
}

#[derive(Debug)]
pub struct Chunked {
    state: State,
    /// The remaining bytes of the chunk that is being read.
    left: u64,
    line: usize,
    trailers: usize,
}

impl Default for Chunked {
    fn default() -> Self {
        Self { state: State::Size { digits: 0 }, left: 0, line: 0, trailers: 0 }
    }
}

impl Chunked {
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Reads from `input` until it or the body ends, and calls `data` for each piece of the body.
    /// Returns the number of bytes read.
    ///
    /// # Errors
    /// If the framing is invalid.
    pub fn read(&mut self, input: &[u8], mut data: impl FnMut(&[u8])) -> Result<usize, Invalid> {
        let mut at = 0;
        while at < input.len() && !self.is_done() {
            if self.state == State::Data {
                let rest = &input[at..];
                let length = usize::try_from(self.left).map_or(rest.len(), |left| left.min(rest.len()));
                data(&rest[..length]);
                at += length;
                self.left -= length as u64;
                if self.left == 0 {
                    self.state = State::DataCr;
                }
                continue;
            }
            self.state = self.next(input[at])?;
            at += 1;
        }
        Ok(at)
    }

    fn next(&mut self, byte: u8) -> Result<State, Invalid> {
        self.line += 1;
        self.trailers +=
            usize::from(matches!(self.state, State::TrailerStart | State::TrailerName | State::TrailerValue));
        if self.line > MAX_LINE || self.trailers > MAX_TRAILERS {
            return Err(Invalid::Chunk);
        }
        let next = match (self.state, byte) {
            (State::Size { digits }, byte) if byte.is_ascii_hexdigit() && digits < 16 => {
                let digit = char::from(byte).to_digit(16).unwrap_or(0);
                self.left = self.left << 4 | u64::from(digit);
                State::Size { digits: digits + 1 }
            }
            (State::Size { digits: 1.. }, b';') => State::Extension,
            (State::Size { digits: 1.. } | State::Extension, b'\r') => State::SizeEnd,
            (State::Extension, byte) if is_text(byte) => State::Extension,
            (State::SizeEnd, b'\n') if self.left == 0 => State::TrailerStart,
            (State::SizeEnd, b'\n') => State::Data,
            (State::DataCr, b'\r') => State::DataLf,
            (State::DataLf, b'\n') => State::Size { digits: 0 },
            (State::TrailerStart, b'\r') => State::FinalLf,
            (State::TrailerName, b':') => State::TrailerValue,
            (State::TrailerStart | State::TrailerName, byte) if is_token(byte) => State::TrailerName,
            (State::TrailerValue, b'\r') => State::TrailerLf,
            (State::TrailerValue, byte) if is_text(byte) => State::TrailerValue,
            (State::TrailerLf, b'\n') => State::TrailerStart,
            (State::FinalLf, b'\n') => State::Done,
            _ => return Err(Invalid::Chunk),
        };
        if matches!(next, State::Data | State::TrailerStart | State::Size { digits: 0 }) {
            self.line = 0;
        }
        Ok(next)
    }
}

fn is_text(byte: u8) -> bool {
    byte == b'\t' || byte >= b' ' && byte != 127
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The body and the bytes that follow it.
    type Decoded = (Vec<u8>, Vec<u8>);

    /// Decodes `input` in pieces of several sizes, which must all give the same result; `None` if
    /// the body has no end.
    fn decode(input: &[u8]) -> Result<Option<Decoded>, Invalid> {
        let results = [1, 3, input.len().max(1)].map(|piece| {
            let (mut chunked, mut body, mut left) = (Chunked::default(), Vec::new(), Vec::new());
            for piece in input.chunks(piece) {
                let read = chunked.read(piece, |data| body.extend_from_slice(data))?;
                left.extend_from_slice(&piece[read..]);
            }
            Ok(chunked.is_done().then_some((body, left)))
        });
        assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
        results.into_iter().next().unwrap()
    }

    #[test]
    fn valid_bodies_are_decoded() {
        for (input, body, left) in [
            ("0\r\n\r\n", "", ""),
            ("3\r\nabc\r\n0\r\n\r\nGET", "abc", "GET"),
            ("00a\r\n0123456789\r\n1\r\nx\r\n0\r\n\r\n", "0123456789x", ""),
            ("A;a=\"b c\"\r\n0123456789\r\n0;x\r\nSome-Field: 1\r\nb:\r\n\r\n", "0123456789", ""),
        ] {
            assert_eq!(decode(input.as_bytes()), Ok(Some((body.into(), left.into()))), "{input:?}");
        }
        for part in ["", "3", "3\r\n", "3\r\nab", "3\r\nabc", "3\r\nabc\r\n", "0\r\n", "0\r\na: b\r\n"] {
            assert_eq!(decode(part.as_bytes()), Ok(None), "{part:?}");
        }
    }

    #[test]
    fn invalid_chunks_are_refused() {
        let long = format!("1;{}\r\nx\r\n", "e".repeat(MAX_LINE));
        let trailers = format!("0\r\n{}\r\n", format!("a: {}\r\n", "b".repeat(900)).repeat(10));
        for input in [
            "\r\n",
            "x\r\n",
            "+3\r\nabc\r\n",
            "-3\r\n",
            "0x3\r\nabc\r\n",
            " 3\r\nabc\r\n",
            "3 \r\nabc\r\n",
            "3\nabc\r\n",
            "3\rabc",
            "3;a\nabc",
            ";a\r\n",
            "3\r\nabcd\r\n",
            "3\r\nabc\n",
            "3\r\nabc0\r\n\r\n",
            "11111111111111111\r\n",
            "0\r\n\n",
            "0\r\n a: b\r\n\r\n",
            "0\r\na : b\r\n\r\n",
            "0\r\n: b\r\n\r\n",
            "0\r\na\r\n\r\n",
            "0\r\na: b\n\r\n",
            "0\r\na: b\r\n c\r\n\r\n",
            long.as_str(),
            trailers.as_str(),
        ] {
            assert_eq!(decode(input.as_bytes()), Err(Invalid::Chunk), "{input:?}");
        }
    }
}
