#include "server/peer/message.h"

#include <gtest/gtest.h>

namespace shardd::peer {
namespace {

TEST(Frame, HeaderAndBytesComeBack) {
  v1::PeerFrame frame;
  frame.set_sequence(7);
  frame.mutable_message()->set_job("gpt");
  const auto bytes = std::make_shared<const std::string>(kMaxPieceBytes, 'x');
  const auto decoded = DecodeFrame(EncodeFrame(frame, bytes));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->frame.sequence(), 7u);
  EXPECT_EQ(decoded->frame.message().job(), "gpt");
  EXPECT_EQ(decoded->bytes, *bytes);
}

TEST(Frame, WhatIsNoFrameIsRefused) {
  for (const std::string& wire : {std::string(), std::string("abc"), std::string(4, '\xff'),
                                  std::string("\x02\0\0\0\xff\xff", 6)}) {
    grpc::Slice slice(wire);
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeFrame(grpc::ByteBuffer(&slice, 1)).status()));
  }
}

TEST(Frame, MoreThanAPieceIsRefused) {
  const auto bytes = std::make_shared<const std::string>(kMaxPieceBytes + 1, 'x');
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeFrame(EncodeFrame({}, bytes)).status()));
}

}  // namespace
}  // namespace shardd::peer
