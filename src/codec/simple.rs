//! The codecs that need no format: bytes as they are, and UTF-8.

use super::{Codec, CodecError};

/// Bytes, stored as they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes;

impl Codec for Bytes {
    type Item = Vec<u8>;

    fn encode(&self, item: &Vec<u8>) -> Result<Vec<u8>, CodecError> {
        Ok(item.clone())
    }

    fn decode(&self, bytes: &[u8]) -> Result<Vec<u8>, CodecError> {
        Ok(bytes.to_vec())
    }
}

/// Text, stored as UTF-8; decoding refuses anything else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Text;

impl Codec for Text {
    type Item = String;

    fn encode(&self, item: &String) -> Result<Vec<u8>, CodecError> {
        Ok(item.clone().into_bytes())
    }

    fn decode(&self, bytes: &[u8]) -> Result<String, CodecError> {
        Ok(std::str::from_utf8(bytes)?.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn values_come_back() {
        assert_eq!(Bytes.decode(&Bytes.encode(&vec![0, 255]).unwrap()).unwrap(), [0, 255]);
        assert_eq!(Text.decode(&Text.encode(&"zäh".to_owned()).unwrap()).unwrap(), "zäh");
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_by_key() {
        let error = super::super::decode(&Text, "/a", &[0xff]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Codec);
        assert!(error.to_string().contains("`/a`"), "{error}");
    }
}
