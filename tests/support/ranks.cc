#include "tests/support/ranks.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/cast.h"

namespace shardd::test {

namespace {

[[noreturn]] void Die(const std::string& what, const absl::Status& status) {
  std::fprintf(stderr, "test set-up: %s: %s\n", what.c_str(), status.ToString().c_str());
  std::abort();
}

}  // namespace

JobOptions SmallJob(const std::string& name, uint32_t slots) {
  JobOptions job;
  job.name = name;
  job.slots = slots;
  job.grad_dtype = DType::kFloat32;
  job.weight_dtype = DType::kFloat32;
  job.chunk_elements = 4096;
  job.bucket_elements = 4096;
  job.groups = {ParameterGroup{"all", 1e-2, 0.0, 0.999, 1e-8, 0.0}};
  job.join_timeout = absl::Seconds(60);
  job.step_timeout = absl::Seconds(60);
  return job;
}

SessionOptions RankOptions(const std::string& socket, uint32_t rank, uint32_t world_size) {
  SessionOptions options;
  options.address = socket;
  options.rank = rank;
  options.world_size = world_size;
  options.log = [](const std::string&) {};
  return options;
}

std::unique_ptr<Session> OpenRank(const std::string& socket, uint32_t rank, uint32_t world_size,
                                  const JobOptions& job,
                                  const std::vector<ParameterSpec>& parameters, float initial) {
  auto session = Session::Open(RankOptions(socket, rank, world_size), job, parameters);
  if (!session.ok()) Die("Open", session.status());
  if ((*session)->initialising()) {
    for (size_t p = rank; p < parameters.size(); p += world_size) {
      const std::vector<float> values((*session)->parameter_elements(p), initial);
      if (absl::Status s = (*session)->Upload(p, 0, values); !s.ok()) Die("Upload", s);
    }
  }
  if (absl::Status s = (*session)->FinishUpload(); !s.ok()) Die("FinishUpload", s);
  return *std::move(session);
}

void ForEachRank(uint32_t world_size, const std::function<void(uint32_t rank)>& fn) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < world_size; ++rank) threads.emplace_back(fn, rank);
  for (std::thread& thread : threads) thread.join();
}

void StoreAs(DType dtype, float value, void* out) {
  kernels::Fp32ToGrad(kernels::Isa::kScalar, &value, 1, out, static_cast<kernels::DType>(dtype));
}

float LoadAs(DType dtype, const void* in) {
  float value;
  kernels::ToFp32(kernels::Isa::kScalar, in, static_cast<kernels::DType>(dtype), 1, &value);
  return value;
}

absl::Status GiveGrad(Session* session, DType dtype, size_t parameter, uint32_t slot,
                      const GradFunction& value) {
  absl::StatusOr<void*> buffer = session->AcquireGrad(parameter, slot);
  if (!buffer.ok()) return buffer.status();
  auto* out = static_cast<std::byte*>(*buffer);
  for (uint64_t i = 0; i < session->parameter_elements(parameter); ++i) {
    StoreAs(dtype, value(parameter, i), out + i * DTypeBytes(dtype));
  }
  return session->ReadyGrad(parameter, slot);
}

absl::StatusOr<Decision> TakeStep(
    Session* session, DType dtype,
    const std::function<float(uint32_t slot, size_t parameter, uint64_t element)>& value,
    StepReport report) {
  const Slots slots = session->slots();
  for (uint32_t slot = slots.lo; slot < slots.hi; ++slot) {
    for (size_t p = session->num_parameters(); p-- > 0;) {
      absl::Status status = GiveGrad(session, dtype, p, slot, [&](size_t parameter, uint64_t i) {
        return value(slot, parameter, i);
      });
      if (!status.ok()) return status;
    }
  }
  if (report.slots.empty()) report.slots.resize(slots.hi - slots.lo);
  if (absl::Status status = session->EndStep(report); !status.ok()) return status;
  return session->WaitDecision();
}

std::vector<float> ReadAll(Session* session, StateKind kind, size_t parameter) {
  std::vector<float> values(session->parameter_elements(parameter));
  absl::Status status = session->ReadState(kind, parameter, 0, std::span<float>(values));
  if (!status.ok()) Die("ReadState", status);
  return values;
}

}  // namespace shardd::test
