#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/safetensors/reader.h"
#include "proto/safetensors/writer.h"

namespace shardd::safetensors {
namespace {

using ::testing::HasSubstr;

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/safetensors_test.XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

  // A file of exactly this header text and this much data.
  std::string WriteRaw(const std::string& header, size_t data_bytes) {
    const std::string path = Path("raw.safetensors");
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    const uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << header << std::string(data_bytes, '\x01');
    return path;
  }

  void ExpectRefused(const std::string& header, size_t data_bytes, const std::string& message) {
    const auto reader = Reader::Open(WriteRaw(header, data_bytes));
    ASSERT_FALSE(reader.ok()) << header;
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr(message)) << header;
    EXPECT_THAT(std::string(reader.status().message()), HasSubstr("raw.safetensors"));
  }

  std::string directory_;
};

template <typename T>
std::span<const std::byte> AsBytes(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

TEST_F(SafetensorsTest, RoundTripOfEveryDType) {
  const std::string path = Path("all.safetensors");
  const std::pair<DType, size_t> kAll[] = {{DType::kF64, 8}, {DType::kI64, 8},  {DType::kF32, 4},
                                           {DType::kI32, 4}, {DType::kBF16, 2}, {DType::kF16, 2}};
  auto writer =
      Writer::Create(path, {.metadata = {{"step", "12"}, {"quote", "a\"b\\"}}, .buffer_bytes = 64});
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (const auto& [dtype, size] : kAll) {
    ASSERT_TRUE((*writer)->Declare(std::string(DTypeName(dtype)), dtype, {3, 5}).ok());
  }
  ASSERT_TRUE((*writer)->Declare("scalar", DType::kF32, {}).ok());
  ASSERT_TRUE((*writer)->Declare("empty", DType::kF32, {8, 0, 24}).ok());
  std::vector<uint8_t> data;
  for (const auto& [dtype, size] : kAll) data.resize(data.size() + 15 * size);
  data.resize(data.size() + 4);
  std::iota(data.begin(), data.end(), 0);
  // Pieces that straddle tensors and the buffer.
  for (size_t at = 0; at < data.size(); at += 37) {
    const size_t n = std::min<size_t>(37, data.size() - at);
    ASSERT_TRUE((*writer)->Append(AsBytes(data).subspan(at, n)).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(path)) << "visible before Finish";
  ASSERT_TRUE((*writer)->Finish().ok());

  auto reader = Reader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->metadata().at("quote"), "a\"b\\");
  ASSERT_EQ((*reader)->tensors().size(), 8u);
  size_t at = 0;
  for (const auto& [dtype, size] : kAll) {
    const TensorInfo* info = (*reader)->Find(DTypeName(dtype));
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->dtype, dtype);
    EXPECT_EQ(info->elements(), 15u);
    EXPECT_EQ(info->shape, (std::vector<int64_t>{3, 5}));
    const auto bytes = (*reader)->Bytes(info->name);
    ASSERT_TRUE(bytes.ok());
    ASSERT_EQ(bytes->size(), 15 * size);
    EXPECT_EQ(std::memcmp(bytes->data(), data.data() + at, 15 * size), 0);
    at += 15 * size;
  }
  EXPECT_EQ((*reader)->Find("scalar")->elements(), 1u);
  EXPECT_EQ((*reader)->Bytes("empty")->size(), 0u);
  EXPECT_EQ((*reader)->Values<float>("empty", DType::kF32)->size(), 0u);
  const auto missing = (*reader)->Bytes("absent");
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("no tensor 'absent'"));
  const auto wrong = (*reader)->Values<float>("I32", DType::kF32);
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("is I32, not F32"));
}

TEST_F(SafetensorsTest, WriterMisuseIsNamed) {
  const std::string path = Path("misuse.safetensors");
  {
    auto writer = Writer::Create(path, {});
    ASSERT_TRUE(writer.ok());
    EXPECT_TRUE((*writer)->Declare("a", DType::kF32, {2}).ok());
    EXPECT_THAT(std::string((*writer)->Declare("a", DType::kF32, {2}).message()),
                HasSubstr("'a' is declared twice"));
    EXPECT_FALSE((*writer)->Declare("__metadata__", DType::kF32, {2}).ok());
    EXPECT_FALSE((*writer)->Declare("b", DType::kF32, {-1}).ok());
    EXPECT_FALSE((*writer)->Declare("c", DType::kF32, {INT64_MAX, INT64_MAX}).ok());
    const std::vector<float> one = {1.0f};
    ASSERT_TRUE((*writer)->Append(AsBytes(one)).ok());
    EXPECT_EQ((*writer)->Declare("d", DType::kF32, {1}).code(),
              absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string((*writer)->Finish().message()), HasSubstr("tensor 'a' is missing"));
    const std::vector<float> two = {1.0f, 2.0f};
    EXPECT_EQ((*writer)->Append(AsBytes(two)).code(), absl::StatusCode::kOutOfRange);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_)) << "an abandoned writer leaves nothing";
}

TEST_F(SafetensorsTest, WriterReportsWhereItCannotWrite) {
  const auto writer = Writer::Create(Path("no/such/directory/x"), {});
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(writer.status().message()), HasSubstr("no/such/directory"));
}

TEST_F(SafetensorsTest, ReaderRefusesWhatIsMalformed) {
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_TRUE(Reader::Open(WriteRaw("{" + a + "}   ", 8)).ok());
  EXPECT_TRUE(Reader::Open(WriteRaw("{}", 0)).ok());
  ExpectRefused("{" + a + "}", 7, "ends at 8 of 7");
  ExpectRefused("{" + a + "}", 9, "end at 8 of 9");
  ExpectRefused("{" + a + "," + a + "}", 8, "'a' twice");
  ExpectRefused("[1,2]", 0, "not a JSON object");
  ExpectRefused("{\"a\":", 0, "not a JSON object");
  ExpectRefused("", 0, "not a JSON object");
  ExpectRefused(R"({"a":3})", 0, "tensor 'a' lacks");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2]}})", 8, "tensor 'a' lacks");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 2, "dtype U8");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "no size");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 8, "no size");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "takes 12 bytes");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "takes 8 bytes");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
                "2^63");
  ExpectRefused(R"({"__metadata__":{"k":1}})", 0, "metadata 'k'");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[[[[[1]]]]],"data_offsets":[0,4]}})", 4, "deeply");
  const std::string b_overlap = R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]})";
  ExpectRefused("{" + a + "," + b_overlap + "}", 8, "overlap or hole");
  const std::string b_hole = R"("b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]})";
  ExpectRefused("{" + a + "," + b_hole + "}", 16, "overlap or hole");
}

TEST_F(SafetensorsTest, APipeIsRefusedAndNotWaitedFor) {
  const std::string path = WriteRaw("{}", 0) + ".pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const absl::Status refused = Reader::Open(path).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
}

TEST_F(SafetensorsTest, ReaderRefusesHeaderLengthsThatDoNotFit) {
  const std::string path = Path("raw.safetensors");
  for (uint64_t length : {uint64_t{100}, ~uint64_t{0}, uint64_t{1} << 40}) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << "{}";
    out.close();
    EXPECT_EQ(Reader::Open(path).status().code(), absl::StatusCode::kDataLoss) << length;
  }
  std::ofstream(path, std::ios::trunc) << "1234567";
  EXPECT_EQ(Reader::Open(path).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Reader::Open(Path("absent")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(Reader::Open(directory_).ok());
}

// Every truncation and many single-byte changes of a good file: opened or
// refused, never read out of bounds (run under asan).
TEST_F(SafetensorsTest, DamagedFilesNeverCrash) {
  const std::string path = Path("good.safetensors");
  auto writer = Writer::Create(path, {.metadata = {{"k", "v"}}});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Declare("w", DType::kF32, {4, 3}).ok());
  ASSERT_TRUE((*writer)->Declare("b", DType::kBF16, {5}).ok());
  const std::vector<uint8_t> data(12 * 4 + 5 * 2, 7);
  ASSERT_TRUE((*writer)->Append(AsBytes(data)).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  std::ifstream in(path, std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(in)), {});
  const std::string damaged_path = Path("damaged.safetensors");
  auto open_with = [&](const std::string& content) {
    std::ofstream(damaged_path, std::ios::binary | std::ios::trunc) << content;
    auto reader = Reader::Open(damaged_path);
    if (!reader.ok()) return false;
    for (const TensorInfo& tensor : (*reader)->tensors()) {
      const auto bytes = *(*reader)->Bytes(tensor.name);
      unsigned sum = 0;
      for (std::byte b : bytes) sum += static_cast<unsigned>(b);
      EXPECT_EQ(sum, 7 * bytes.size());
    }
    return true;
  };
  EXPECT_TRUE(open_with(good));
  for (size_t n = 0; n < good.size(); ++n) EXPECT_FALSE(open_with(good.substr(0, n))) << n;
  const size_t header_end = good.size() - data.size();
  for (size_t i = 0; i < header_end; ++i) {
    for (char c : {'\0', '9', '}', '"', '\xff'}) {
      std::string bad = good;
      bad[i] = c;
      open_with(bad);
    }
  }
}

}  // namespace
}  // namespace shardd::safetensors
