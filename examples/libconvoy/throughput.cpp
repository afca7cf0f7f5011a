// Serves a portable package from several threads with libconvoy, and prints calls a second: one net, shared, and a run for each thread.
//
//     c++ -std=c++17 throughput.cpp -Ibuild/libconvoy -Lbuild/libconvoy -lconvoy -Wl,-rpath,build/libconvoy -pthread -o throughput
//     ./throughput resnet18.convoy 4 100

#include <convoy.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void check(convoy_status status) {
    if (status != CONVOY_OK) throw std::runtime_error(convoy_last_error());
}

class Net {
public:
    explicit Net(const std::string &path) {
        convoy_net *opened = nullptr;
        check(convoy_open(path.c_str(), CONVOY_TRUST, &opened));
        net_.reset(opened);
    }

    void set_threads(int threads) { check(convoy_set_threads(net_.get(), threads)); }

    // Memory of one caller: tensors of the first program.
    class Call {
    public:
        explicit Call(convoy_net *net) : net_(net) {
            add(inputs_, convoy_input_count(net, 0), convoy_input);
            add(outputs_, convoy_output_count(net, 0), convoy_output);
        }

        void run() { check(convoy_run(net_, inputs_.data(), inputs_.size(), outputs_.data(), outputs_.size())); }

        // The bytes of the first output.
        const std::vector<double> &first_output() const { return memory_[inputs_.size()]; }

    private:
        using Ask = convoy_status (*)(const convoy_net *, std::size_t, std::size_t, convoy_tensor_info *);

        void add(std::vector<convoy_tensor> &tensors, std::size_t count, Ask ask) {
            for (std::size_t i = 0; i < count; i++) {
                convoy_tensor_info info;
                check(ask(net_, 0, i, &info));
                memory_.emplace_back(info.size_bytes / sizeof(double) + 1, 0.0);  // of doubles, so that it is aligned
                tensors.push_back({memory_.back().data(), info.dtype, info.rank, info.shape});
            }
        }

        convoy_net *net_;
        std::vector<std::vector<double>> memory_;
        std::vector<convoy_tensor> inputs_, outputs_;
    };

    Call call() const { return Call(net_.get()); }

private:
    struct Close {
        void operator()(convoy_net *net) const { convoy_close(net); }
    };
    std::unique_ptr<convoy_net, Close> net_;
};

}  // namespace

int main(int count, char **words) try {
    if (count < 2) {
        std::fprintf(stderr, "usage: throughput NET.convoy [THREADS] [CALLS]\n");
        return 2;
    }
    const int threads = count > 2 ? std::atoi(words[2]) : 2, calls = count > 3 ? std::atoi(words[3]) : 100;
    Net net(words[1]);
    net.set_threads(1);  // each caller has a core of its own
    Net::Call first = net.call();
    first.run();
    std::vector<std::thread> callers;
    std::vector<int> same(threads, 0);
    const auto begun = std::chrono::steady_clock::now();
    for (int i = 0; i < threads; i++)
        callers.emplace_back([&, i] {
            Net::Call own = net.call();
            for (int k = 0; k < calls; k++) {
                own.run();
                same[i] += own.first_output() == first.first_output();
            }
        });
    for (auto &caller : callers) caller.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    for (int found : same)
        if (found != calls) throw std::runtime_error("two calls gave different results");
    std::printf("%d threads, %d calls: %.1f calls a second, all results equal\n", threads, threads * calls, threads * calls / took.count());
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
