//! How values become the bytes that stand in etcd, and back.

#[cfg(feature = "json")]
mod json;
mod simple;

#[cfg(feature = "json")]
pub use json::Json;
pub use simple::{Bytes, Text};

use crate::error::{Error, ErrorKind, Result};

/// What a codec of the user's fails with.
pub type CodecError = Box<dyn std::error::Error + Send + Sync>;

/// Turns values into bytes and back.
///
/// The bytes are all that stands in etcd, so programs in other languages read them as they are.
/// A codec is called on the caller's thread, with no lock of the library held.
///
/// # Example: a port number in two bytes
///
/// ```
/// use etcd_recipes::Codec;
/// use etcd_recipes::codec::CodecError;
///
/// struct Port;
///
/// impl Codec for Port {
///     type Item = u16;
///
///     fn encode(&self, port: &u16) -> Result<Vec<u8>, CodecError> {
///         Ok(port.to_be_bytes().to_vec())
///     }
///
///     fn decode(&self, bytes: &[u8]) -> Result<u16, CodecError> {
///         Ok(u16::from_be_bytes(bytes.try_into()?))
///     }
/// }
/// assert_eq!(Port.decode(&Port.encode(&2379).unwrap()).unwrap(), 2379);
/// ```
pub trait Codec: Send + Sync + 'static {
    /// What is stored.
    type Item;

    /// The bytes of a value.
    ///
    /// # Errors
    ///
    /// The value has no such form.
    fn encode(&self, item: &Self::Item) -> std::result::Result<Vec<u8>, CodecError>;

    /// The value of these bytes, which anybody may have written.
    ///
    /// # Errors
    ///
    /// They are none of this codec's.
    fn decode(&self, bytes: &[u8]) -> std::result::Result<Self::Item, CodecError>;
}

/// Encodes a value that is to stand at `key`.
pub(crate) fn encode<C: Codec>(codec: &C, key: &str, item: &C::Item) -> Result<Vec<u8>> {
    codec.encode(item).map_err(|error| {
        Error::with_source(ErrorKind::Codec, format!("the value for `{key}` has no bytes"), error)
    })
}

/// Decodes what stands at `key`.
pub(crate) fn decode<C: Codec>(codec: &C, key: &str, bytes: &[u8]) -> Result<C::Item> {
    codec.decode(bytes).map_err(|error| {
        Error::with_source(ErrorKind::Codec, format!("the bytes at `{key}` are no value"), error)
    })
}
