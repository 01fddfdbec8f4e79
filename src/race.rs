//! Waiting for whichever of two futures is ready first; the other is dropped.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

pub(crate) enum Either<A, B> {
    First(A),
    Second(B),
}

/// Polls `first` before `second`, so a value that is there wins over a limit that has passed.
pub(crate) async fn race<A: Future, B: Future>(
    first: A,
    second: B,
) -> Either<A::Output, B::Output> {
    let mut first = pin!(first);
    let mut second = pin!(second);
    poll_fn(|cx| {
        if let Poll::Ready(value) = first.as_mut().poll(cx) {
            return Poll::Ready(Either::First(value));
        }
        second.as_mut().poll(cx).map(Either::Second)
    })
    .await
}
