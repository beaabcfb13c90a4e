// TRL's default loss in C++, as a process of its own: `c++ -O2 -std=c++17 worker.cpp -o worker; assay check --exec ./worker`.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>
using std::string;

// What stands between `key` and `end`: enough of JSON for lines and headers that a program wrote.
string after(const string& text, const string& key, const char* end) {
    size_t from = text.find(key) + key.size();
    return text.substr(from, text.find_first_of(end, from) - from);
}

int main() {
    std::cout << R"({"protocol": "assay-check/1", "dtypes": ["f32"], "outputs": []})" << std::endl;
    for (string line; std::getline(std::cin, line);) {
        std::ifstream in(after(line, "\"problem\":\"", "\""), std::ios::binary);
        string file{std::istreambuf_iterator<char>(in), {}}, header = file.substr(8, *(uint64_t*)file.data());
        auto tensor = [&](const string& name) { return header.substr(header.find("\"" + name + "\"")); };
        auto data = [&](const string& name) {
            return file.data() + 8 + header.size() + std::stoul(after(tensor(name), "\"data_offsets\":[", ","));
        };
        string shape = after(tensor("logits"), "\"shape\":[", "]");
        size_t B, T, V;
        std::sscanf(shape.c_str(), "%zu,%zu,%zu", &B, &T, &V);
        auto x = (const float*)data("logits"), a = (const float*)data("advantages"), old = (const float*)data("old_logps");
        auto ids = (const int64_t*)data("ids");
        auto mask = data("mask");
        std::vector<float> outputs(1 + B * T * V);  // the loss, then dlogits
        double n = std::count(mask, mask + B * T, 1), loss = 0;
        for (size_t r = 0; r < B * T; r++) {
            if (!mask[r]) continue;
            const float* z = x + r * V;
            double top = *std::max_element(z, z + V), sum = 0, A = a[r / T];
            for (size_t v = 0; v < V; v++) sum += std::exp(z[v] - top);
            double ratio = std::exp(z[ids[r]] - top - std::log(sum) - old[r]);
            loss -= std::fmin(ratio * A, std::clamp(ratio, 0.8, 1.2) * A) / n;
            if (A > 0 ? ratio > 1.2 : ratio < 0.8) continue;
            float* dlogits = &outputs[1 + r * V];
            for (size_t v = 0; v < V; v++) dlogits[v] = -ratio * A / n * ((v == (size_t)ids[r]) - std::exp(z[v] - top) / sum);
        }
        outputs[0] = loss;
        size_t bytes = 4 * outputs.size();
        header = R"({"loss":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"dlogits":{"dtype":"F32","shape":[)" + shape +
                 R"(],"data_offsets":[4,)" + std::to_string(bytes) + "]}}";
        uint64_t length = header.size();
        std::ofstream out(after(line, "\"candidate\":\"", "\""), std::ios::binary);
        out.write((char*)&length, 8).write(header.data(), length).write((char*)outputs.data(), bytes).flush();
        std::cout << "{\"id\": " << after(line, "\"id\":", ",") << "}" << std::endl;
    }
}
