//! Values as JSON, by way of serde.

use std::fmt;
use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Codec, CodecError};

/// Values that serde knows, stored as compact JSON. Needs the feature `json`.
///
/// # Example: a node with two addresses
///
/// ```
/// # use etcd_recipes::{Client, TransientKeyValue};
/// use etcd_recipes::codec::Json;
///
/// # fn main() -> etcd_recipes::Result<()> {
/// # let client = Client::connect(["http://127.0.0.1:2379"])?;
/// let addresses = vec!["10.0.0.7".to_owned(), "10.1.0.7".to_owned()];
/// let node = TransientKeyValue::builder(&client, "/nodes/7", addresses)
///     .codec(Json::<Vec<String>>::new())
///     .build()?;
/// assert_eq!(node.value()?.len(), 2);
/// # Ok(()) }
/// ```
pub struct Json<T>(PhantomData<fn() -> T>);

impl<T> Json<T> {
    /// The codec for values of type `T`.
    pub fn new() -> Json<T> {
        Json(PhantomData)
    }
}

impl<T> Default for Json<T> {
    fn default() -> Self {
        Json::new()
    }
}

impl<T> Clone for Json<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Json<T> {}

impl<T> fmt::Debug for Json<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Json")
    }
}

impl<T: Serialize + DeserializeOwned + 'static> Codec for Json<T> {
    type Item = T;

    fn encode(&self, item: &T) -> Result<Vec<u8>, CodecError> {
        Ok(serde_json::to_vec(item)?)
    }

    fn decode(&self, bytes: &[u8]) -> Result<T, CodecError> {
        Ok(serde_json::from_slice(bytes)?)
    }
}
